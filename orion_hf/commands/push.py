"""Push a saved adapter, or all adapters below a folder, to the Hub."""

import argparse
import sys

from ..cli import refuse_token


def main(argv: list[str] | None = None) -> int:
    """``orion-hf push FOLDER REPO [--merged] [--private] [--all]``.

    There is no option for the token, because everybody on a machine can read command lines: it is taken from
    HF_TOKEN or from ``hf auth login``. Exit code 0, or 1 if some of several pushes failed.
    """
    parser = argparse.ArgumentParser(prog="orion-hf push", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER", help="of an adapter or a merged model; with --all, of several")
    parser.add_argument("repo", metavar="REPO", help="org/name; with --all, the organisation or user alone")
    parser.add_argument("--merged", action="store_true", help='also push full weights, on the revision "merged"')
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--all", action="store_true", help="push every adapter below FOLDER as REPO/orion-<task>")
    parser.add_argument("--revision", help="branch to push to (default: main)")
    parser.add_argument("--create-pr", action="store_true", help="propose the change as a pull request")
    parser.add_argument("--message", help="title of the commit")
    parser.add_argument("--license", help="licence of the weights for the card, such as mit")
    parser.add_argument("--token", type=refuse_token, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    from ..escaping import printable
    from ..hub import find_adapters, push_folder

    if args.all and "/" in args.repo:
        raise ValueError(f"with --all REPO is an organisation or user alone, not {args.repo!r}.")
    folders = find_adapters(args.folder) if args.all else {args.repo: args.folder}
    failed = 0
    for name, folder in folders.items():
        try:
            push = push_folder(
                folder,
                f"{args.repo}/{name}" if args.all else name,
                merged=args.merged,
                private=args.private or None,
                revision=args.revision,
                create_pr=args.create_pr,
                commit_message=args.message,
                license=args.license,
            )
        except (ValueError, OSError, RuntimeError) as error:
            if not args.all:
                raise
            failed += 1
            print(f"orion-hf push: {printable(str(error))}", file=sys.stderr)
            continue
        print(f"{push.url}  {'pushed' if push.changed else 'unchanged'} {push.commit[:8]}")
    return 1 if failed else 0
