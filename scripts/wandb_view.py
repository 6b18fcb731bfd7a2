"""Make the saved view of a wandb project, with the metrics in sections, unless the project has it:

slipstream wandb-view PROJECT           # of your own account
slipstream wandb-view ENTITY/PROJECT    # of a user or team
slipstream wandb-view PROJECT --report  # and a report that compares async runs with sync ones

Runs with wandb.mode=online make the view themselves. You must be logged in (`wandb login`, or WANDB_API_KEY).
"""

import argparse
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", metavar="PROJECT", help="name of the project, after its entity and a slash or alone")
    parser.add_argument("--report", action="store_true", help="make the report, too: a new one each time")
    options = parser.parse_args()
    try:
        for line in make(options.project, with_report=options.report):
            sys.stdout.write(f"{line}\n")
    except ImportError as error:
        sys.exit(f"wandb_view: {error}; pip install wandb-workspaces")
    except Exception as error:  # wandb's own are of many kinds, and all say what to do
        sys.exit(f"wandb_view: {type(error).__name__}: {error}")


def make(name: str, *, with_report: bool) -> list[str]:
    """Make what `name`, "project" or "entity/project", lacks. Return what there is now, a line each.

    Raises what `ensure_workspace` raises.
    """
    from trainer.tracking.wandb.workspace import default_entity, ensure_workspace, save_report

    entity, _, project = name.rpartition("/")
    entity = entity or default_entity()
    address = ensure_workspace(entity, project)
    lines = [f"{entity}/{project} has the saved view already" if address is None else f"saved view: {address}"]
    if with_report:
        lines.append(f"report: {save_report(entity, project)}")
    return lines


if __name__ == "__main__":
    main()
