"""How a turn is decided: ReAct, Tree of Thoughts, MCTS, best of n. Start with ``base``, then ``search``."""
