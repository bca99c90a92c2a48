"""How a turn is decided: ReAct, Tree of Thoughts, MCTS, best of n, next best. Start with ``react``, then ``search``."""
