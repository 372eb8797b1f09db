"""The site builds without a warning, links and anchors included, and its pages load nothing from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_site(tmp_path):
    if not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))):
        pytest.skip("MkDocs, its theme or mkdocstrings is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        html = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]* (?:src|href)="([^"]*)"', html)
        assert loaded and not [url for url in loaded if "//" in url], page
        assert ":func:" not in html and "::: " not in html, page
    api = (tmp_path / "api.html").read_text()
    for name in ("get_compressor", "Compressor.encode", "torch.optimizer.DistributedOptimizer", "keras.callbacks.MetricAverageCallback"):
        assert f'id="hvd_quant.{name}"' in api
