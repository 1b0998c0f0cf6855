"""First on PYTHONPATH while a mutant is judged, so every interpreter that a test starts imports it too."""

import mutant_hook

mutant_hook.install()
