"""Are the packages that the course needs here? Called by the setup cell of every notebook.

On Colab those that are missing are installed by name. PyTorch, NumPy and the kernel stay as they
are, since the running kernel uses them. Elsewhere nothing is installed: the refusal says what to
run.
"""

import importlib
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

NEEDED = (  # modules that are called as their packages are
    "gguf",
    "huggingface_hub",
    "matplotlib",
    "safetensors",
    "sentencepiece",
    "tiktoken",
    "tokenizers",
    "torch",
    "tqdm",
)
KEPT = ("torch", "numpy", "ipykernel", "ipython", "jupyter_client")


def install_missing():
    """Install on Colab what is missing; elsewhere refuse with ModuleNotFoundError."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return
    root = Path(__file__).parent.parent
    if "google.colab" not in sys.modules or "torch" in missing:
        raise ModuleNotFoundError(
            f"this kernel's Python ({sys.executable}) lacks {', '.join(missing)}. Choose the "
            f"kernel of the course's .venv, or run: {sys.executable} -m pip install -r "
            f"{root / 'requirements.txt'}"
        )
    kept = []
    for name in KEPT:
        try:
            kept.append(f"{name}=={version(name)}\n")
        except PackageNotFoundError:
            pass
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "kept.txt"
        constraints.write_text("".join(kept))
        command = [sys.executable, "-m", "pip", "install", "-q", "-c", str(constraints), *missing]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        said = [line for line in run.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise OSError(f"pip could not install {', '.join(missing)}: {said[-1].strip()}")
    importlib.invalidate_caches()
