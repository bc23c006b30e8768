import subprocess
import sys

HEAVY = ("deepspeed", "ray", "transformers", "vllm", "flashinfer", "flash_attn")


def test_importing_the_package_imports_no_heavy_third_party():
    script = (
        "import sys, torch; before = set(sys.modules); import rlk_train; "
        f"print([m for m in {HEAVY!r} if m in sys.modules and m not in before])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
