"""Fine-tune a CLIP text encoder on class names: ``accelerate launch training/finetune.py --help``.

The work is done in ``orion_hf/commands/finetune.py``, which ``orion-hf finetune`` runs without a launcher.
"""

import sys

from orion_hf.cli import run

if __name__ == "__main__":
    sys.exit(run("finetune", sys.argv[1:]))
