"""A whole run on this machine, with ports that nothing else uses."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.conftest import REPO, free_port


def demo_config(folder: Path, **sections: dict[str, object]) -> Path:
    """configs/demo.yaml with its own ports and run folder, and sections changed."""
    tree = yaml.safe_load((REPO / "configs" / "demo.yaml").read_text())
    tree["run"]["dir"] = str(folder / "run")
    for teacher in tree["teachers"].values():
        teacher["ports"] = [free_port()]
    for name in ("gateway", "rollout", "trainer"):
        tree.setdefault(name, {})["port"] = free_port()
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
