import re
from pathlib import Path

from rlk_weightsync import Local, Publisher


def test_the_readme_s_code_runs(make_model, make_rollout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)
    assert blocks
    with Publisher(Local(), run_id="readme", consumers=1) as publisher:
        names = {"model": make_model(), "scored": make_rollout(), "publisher": publisher}
        for block in blocks:
            exec(block, names)
    assert names["result"].steps == 1
    assert names["update"].manifest.version == 1
    assert names["extra"] == {"epoch": 0, "next_prompt": 128}
