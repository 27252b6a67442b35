"""Learn from a few labelled images with CLIP's and ORION's prototypes: ``python training/fewshot.py --help``.

The work is done in ``orion_hf/commands/fewshot.py``, which ``orion-hf fewshot`` runs too.
"""

import sys

from orion_hf.cli import run

if __name__ == "__main__":
    sys.exit(run("fewshot", sys.argv[1:]))
