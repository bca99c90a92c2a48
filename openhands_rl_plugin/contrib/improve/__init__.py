"""A git repository as a gym: tasks from its code and its history, their split, their price, and what a run earned.

Start with ``gym`` (the stages that make the tasks), then ``split`` (what is held out), ``fitting`` (prompt and lengths
for the model's context) and ``price``. The training itself is ``apps.loop``.
"""
