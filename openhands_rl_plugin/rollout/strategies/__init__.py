"""How a turn is decided: ReAct, Tree of Thoughts, MCTS, best of n. Start with ``react``, then ``search``."""
