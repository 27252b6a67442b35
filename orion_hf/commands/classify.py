"""Classify images with a CLIP model or an ORION repository."""

import argparse
import json
import sys

from tqdm import tqdm


def main(argv: list[str] | None = None) -> int:
    """``orion-hf classify IMAGE... --model REPO [--labels a,b,c] [--top-k 5] [--json]``.

    Exit code 0, or 1 if some of the images could not be read (the others are classified all the same).
    """
    parser = argparse.ArgumentParser(prog="orion-hf classify", description=__doc__)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="paths or URLs")
    parser.add_argument("--model", required=True, help="id or folder of an ORION repository or any CLIP checkpoint")
    parser.add_argument("--labels", help="comma-separated; default: the repository's class names")
    parser.add_argument("--template", help="such as 'a photo of a {}.'; default: the repository's evaluation template")
    parser.add_argument("--top-k", type=int, default=5, help="labels shown for each image (default: %(default)s)")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument("--device", default=None, help="such as cpu or cuda:0; default: the first accelerator")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    args = parser.parse_intermixed_args(argv)

    from ..pipeline import OrionZeroShotImageClassificationPipeline, UnreadableImageError

    options = {"device": args.device} if args.device is not None else {}
    classify = OrionZeroShotImageClassificationPipeline(args.model, revision=args.revision, **options)
    call = {"candidate_labels": args.labels, "hypothesis_template": args.template, "top_k": args.top_k}
    unreadable = 0
    for image in tqdm(args.images, unit="image", disable=len(args.images) < 10, file=sys.stderr):
        try:
            predictions = classify(image, **call)
        except UnreadableImageError as error:
            unreadable += 1
            print(f"orion-hf classify: {error}", file=sys.stderr)
            continue
        if args.json:
            print(json.dumps({"image": image, "predictions": predictions}, ensure_ascii=False))
        else:
            print(image)
            print("\n".join(f"  {100 * p['score']:6.2f} %  {p['label']}" for p in predictions))
    return 1 if unreadable else 0
