"""Every folder with modules is a package that an installation brings along."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"ggufspec": "ggufspec", "kernels": "ggufspec.kernels", "quant": "ggufspec.quant", "tools": "ggufspec.tools"}


def test_every_folder_is_installed():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.parent.relative_to(ROOT / folder).parts
            found[".".join((package, *parts))] = "/".join((folder, *parts))
    assert len(found) > 20
    assert found.keys() == set(setuptools["packages"])
    moved = {name: path for name, path in found.items() if not path.startswith("ggufspec")}
    assert setuptools["package-dir"] == {"ggufspec": "ggufspec", **moved}
