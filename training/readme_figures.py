"""Draw the figures of the README anew: two of those that the demo makes.

python training/readme_figures.py                    # into model_cards/, where the README looks for them
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from orion_hf.commands import demo

FIGURES = ("prototypes", "displacement")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parents[1] / "model_cards")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        demo.main(["--output_dir", folder])
        for name in FIGURES:
            shutil.copyfile(Path(folder) / "plots" / f"{name}.png", args.output_dir / f"readme-{name}.png")


if __name__ == "__main__":
    main()
