"""The prompts of SWE-bench instances. They are SWE-Gym's, byte for byte: models are trained on them, and results
compare only under the same prompts.
"""

from __future__ import annotations

from openhands_rl_plugin.evals.runs.own_suites import own_suite_of
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.hosts.shared.options import UserReplies

_INSTRUCTION = """\
<uploaded_files>
/workspace/{directory}
</uploaded_files>
I've uploaded a python code repository in the directory {directory}. Consider the following PR description:

<pr_description>
{problem_statement}
</pr_description>

Can you help me implement the necessary changes to the repository so that the requirements specified in the \
<pr_description> are met?
I've already taken care of all changes to any of the test files described in the <pr_description>. This means you \
DON'T have to modify the testing logic or any of the tests in any way!
Your task is to make the minimal changes to non-tests files in the /workspace directory to ensure the <pr_description> \
is satisfied.
Follow these steps to resolve the issue:
1. As a first step, it might be a good idea to explore the repo to familiarize yourself with its structure.
2. Create a script to reproduce the error and execute it with `python <filename.py>` using the BashTool, to confirm \
the error
3. Edit the sourcecode of the repo to resolve the issue
4. Rerun your reproduce script and confirm that the error is fixed!
5. Think about edgecases and make sure your fix handles them as well
Your thinking should be thorough and so it's fine if it's very long.
"""

REPLIES = UserReplies(
    first=(
        "Please continue working on the task on whatever approach you think is suitable.\n"
        "If you think you have solved the task, please first send your answer to user through message and then finish"
        " the interaction.\n"
        "IMPORTANT: YOU SHOULD NEVER ASK FOR HUMAN HELP.\n"
    ),
    later='If you want to give up, use the "finish" tool to finish the interaction.\n',
)
"""The answers to a message without a tool call."""


def instruction_of(instance: Instance) -> str:
    """The first message of the conversation."""
    problem = instance.problem_statement
    if (own := own_suite_of(instance)) is not None:
        return f"{problem} The repository is /workspace/{own.directory}."
    # Not by str.format: a problem statement holds braces.
    return _INSTRUCTION.replace("{directory}", directory_of(instance)).replace("{problem_statement}", problem)


def directory_of(instance: Instance) -> str:
    """The name of the repository's directory below ``/workspace``."""
    if (own := own_suite_of(instance)) is not None:
        return own.directory
    return f"{instance.repo}__{instance.version}".replace("/", "__")
