"""Write the card of a saved model, or the pages of the built-in data sets."""

import argparse
import sys
from functools import partial
from pathlib import Path

from ..files import write_whole


def main(argv: list[str] | None = None) -> int:
    """``orion-hf card FOLDER [--repo org/name] [--output FILE]`` or ``orion-hf card --all [--check]``.

    Exit code 0, or 1 if --check found a page that is not up to date.
    """
    parser = argparse.ArgumentParser(prog="orion-hf card", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="of an adapter or a merged model")
    parser.add_argument("--repo", help="where the model is or will be on the Hub (default: your-name/FOLDER)")
    parser.add_argument("--license", help="licence of the weights, such as mit")
    parser.add_argument("--all", action="store_true", help="write the pages of all built-in data sets instead")
    parser.add_argument("--output", help="file, default FOLDER/README.md; with --all folder, default model_cards")
    parser.add_argument("--check", action="store_true", help="write nothing: fail if what is there is out of date")
    args = parser.parse_args(argv)
    if args.all == (args.folder is not None):
        raise ValueError("give either the FOLDER of a model or --all.")

    from ..card import (
        CARD_NAME,
        HEATMAP_NAME,
        dataset_index,
        dataset_names,
        dataset_page,
        is_generated,
        model_card,
        write_heatmap,
    )

    if args.all:
        output = Path(args.output or "model_cards")
        pages = {output / f"{name}.md": dataset_page(name) for name in dataset_names()}
        pages[output / CARD_NAME] = dataset_index()
    else:
        folder = Path(args.folder)
        target = Path(args.output or folder / CARD_NAME)
        if not args.check:
            write_heatmap(folder, folder / HEATMAP_NAME)
        repo_id = args.repo or f"your-name/{folder.resolve().name}"
        pages = {target: str(model_card(folder, repo_id, license=args.license))}
        if target.is_file() and not args.check and not is_generated(target.read_text(encoding="utf-8")):
            raise ValueError(f"{target} was written by hand: remove it, or write the card elsewhere with --output.")
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if args.check:
        for path in stale:
            print(f"orion-hf card: {path} is not up to date", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, partial(_write, pages[path]))
        print(path)
    return 0


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
