"""Ways to have the small repository's tests pass that a guard has to see, written as an attacker would, by kind.

``add`` stays wrong, or ``double(4)`` becomes wrong. Each resolves the row without a guard, unless ``works`` is false.
"""

from __future__ import annotations

import attacks_interpreter
import attacks_pytest
import further.objects
import further.patch_forms
import further.readers
from attack_kit import Attack

ATTACKS: tuple[Attack, ...] = (
    *(*attacks_pytest.ATTACKS, *attacks_interpreter.ATTACKS, *further.patch_forms.ATTACKS),
    *(*further.objects.ATTACKS, *further.readers.ATTACKS),
)
