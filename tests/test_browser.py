"""JupyterLab in a real Chromium: notebooks are shown as they should be, and two run to their end.

Not part of the default run:  python -m pytest tests/test_browser.py -m browser
It needs Debian's chromium (apt-get install chromium). Pictures go to the folder in COURSE_SHOTS.
"""

import base64
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import nbformat
import pytest

from helpers.notebooks import ROOT, SAME_EVERYWHERE, notebook_files

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--window-size=1280,1600",
         "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--remote-debugging-port=0", "--remote-allow-origins=*"]  # fmt: skip
SETTINGS = {  # every cell in the page, so that formulas and images can be counted
    "notebook-extension/tracker": {"windowingMode": "none", "scrollPastEnd": False},
    "docmanager-extension/plugin": {"autosave": False},
}
LOOK = """(() => {
  const root = document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook');
  const images = [...root.querySelectorAll('img')];
  const raw = [...root.querySelectorAll('.jp-RenderedMarkdown')].filter(e => {
    const text = e.cloneNode(true);
    text.querySelectorAll('code,pre,mjx-container').forEach(x => x.remove());
    return /\\$\\$|\\\\frac|\\\\begin\\{|\\\\mathbf/.test(text.textContent); });
  return {formulas: root.querySelectorAll('mjx-container').length,
          bad_formulas: root.querySelectorAll('mjx-merror').length + raw.length,
          images: images.length,
          broken: images.filter(i => !i.complete || !i.naturalWidth).map(i => i.alt + ' ' + i.src.slice(0, 80)),
          errors: root.querySelectorAll('.jp-RenderedText[data-mime-type="application/vnd.jupyter.error"]').length,
          cells: root.querySelectorAll('.jp-Cell').length};
})()"""
NOTEBOOK = "[...window.jupyterapp.shell.widgets('main')].find(w => w.isVisible && w.context)"
FAILED = f"""(() => {{ const found = [], cells = {NOTEBOOK}.content.model.cells;
  for (let i = 0; i < cells.length; i++) {{ const c = cells.get(i).toJSON();
    if (c.cell_type === 'code' && (c.execution_count === null || c.outputs.some(o => o.output_type === 'error')))
      found.push([i, c.outputs]); }} return found; }})()"""


class Browser:
    """Chromium, spoken to by its DevTools protocol."""

    def __init__(self, folder):
        from websocket import create_connection

        self.log = open(folder / "chromium.log", "w")
        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdout=self.log, stderr=self.log, env={**os.environ, "HOME": str(folder)})  # fmt: skip
        port_file, until = folder / "profile" / "DevToolsActivePort", time.time() + 60
        while not port_file.exists() or not port_file.read_text().strip():
            assert time.time() < until and self.process.poll() is None, "Chromium did not start"
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list"))
        page = next(p for p in pages if p["type"] == "page")
        self.socket = create_connection(page["webSocketDebuggerUrl"], timeout=900)
        self.numbers, self.outside = itertools.count(), set()
        self.ask("Network.enable")
        self.ask("Page.enable")
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)

    def ask(self, method, **params):
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            said = json.loads(self.socket.recv())
            if said.get("method") == "Network.requestWillBeSent":
                url = said["params"]["request"]["url"]
                if not url.startswith(("http://127.0.0.1", "data:", "blob:", "about:", "chrome")):
                    self.outside.add(url)
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    def evaluate(self, expression):
        said = self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def wait(self, expression, seconds=60):
        until, said = time.time() + seconds, None
        while time.time() < until:
            try:
                if found := self.evaluate(expression):
                    return found
            except AssertionError as error:  # the page is not ready for the question
                said = str(error)[:500]
            time.sleep(0.2)
        text = self.evaluate("document.title + ': ' + document.body.innerText.slice(0, 500)")
        raise AssertionError(f"after {seconds} s still not: {expression}; {said}; {text}")

    def picture(self, path, height):
        size = {"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        time.sleep(1)
        shot = self.ask("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
        self.ask("Emulation.clearDeviceMetricsOverride")

    def end(self):
        self.socket.close()
        self.process.terminate()
        self.process.wait(20)
        self.log.close()


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    folder = Path(os.environ.get("COURSE_SHOTS") or tmp_path_factory.mktemp("shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on a copy of the course, started above it, from a folder that is neither."""
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    folder = tmp_path_factory.mktemp("lab")
    leave = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".ipynb_checkpoints")
    shutil.copytree(ROOT, folder / "served" / "course", ignore=leave)
    (folder / "elsewhere").mkdir()
    for name, values in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {f"JUPYTER{name}": str(folder / name.lower()) for name in ("_CONFIG_DIR", "_RUNTIME_DIR", "LAB_WORKSPACES_DIR")}  # fmt: skip
    env = {
        **os.environ,
        **SAME_EVERYWHERE,
        **places,
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
    }
    options = {"ServerApp.root_dir": folder / "served", "ServerApp.ip": "127.0.0.1", "ServerApp.port": port,
               "IdentityProvider.token": "", "ServerApp.password": "", "LabApp.expose_app_in_browser": True,
               "LabApp.news_url": None, "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
               "LabApp.extension_manager": "readonly"}  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with open(folder / "lab.log", "w") as log:
        server = subprocess.Popen(
            command, cwd=folder / "elsewhere", env=env, stdout=log, stderr=log
        )
    address, until = f"http://127.0.0.1:{port}", time.time() + 90
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=3).close()
                break
            except OSError:
                alive = server.poll() is None and time.time() < until
                assert alive, (folder / "lab.log").read_text()
                time.sleep(0.3)
        yield address
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def browser(lab, tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.end()
    assert not browser.outside, browser.outside  # nothing is asked of the network


def open_notebook(browser, lab, path):
    place = f"course/{path.relative_to(ROOT).as_posix()}"
    browser.ask("Page.navigate", url=f"{lab}/lab/tree/{quote(place)}?reset")
    cells = len(nbformat.read(path, as_version=4).cells)
    browser.wait(f"{NOTEBOOK}?.context.path === {place!r}")
    browser.evaluate(f"window.jupyterapp.shell.activateById({NOTEBOOK}.id)")
    browser.wait(f"{LOOK}.cells === {cells}")
    browser.wait(f"{NOTEBOOK}.context.sessionContext.session?.kernel?.status === 'idle'", 90)
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", notebook_files(), ids=lambda p: p.stem)
def test_a_notebook_is_shown_with_its_formulas_and_images(path, browser, lab, shots):
    notebook = open_notebook(browser, lab, path)
    markdown = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    formulas = bool(
        re.search(r"\$[^$\n]+\$", re.sub(r"```.*?```|`[^`]*`", "", markdown, flags=re.S))
    )
    images = len(re.findall(r"!\[[^\]]*\]\(", markdown))
    images += sum(
        "image/png" in o.get("data", {}) for c in notebook.cells for o in c.get("outputs", [])
    )
    look = browser.wait(f"(look => look.images >= {images} && !look.broken.length && look.formulas >= {int(formulas)} && look)({LOOK})")  # fmt: skip
    assert look["images"] == images and look["bad_formulas"] == look["errors"] == 0, look
    area = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer"
    height = browser.evaluate(f"document.querySelector('{area}').scrollHeight") + 150
    browser.picture(shots / f"{path.stem}.png", min(height, 16_000))


@pytest.mark.parametrize("path", notebook_files(), ids=lambda p: p.stem)
def test_navigation_links_lead_where_they_say(path, browser, lab):
    notebook = open_notebook(browser, lab, path)
    source = next(c.source for c in notebook.cells if "navigation" in c.metadata.get("tags", []))
    links = re.findall(r"\[([^\]]+)\]\(([^)]+)\)", source)
    assert ("Contents", "../README.md") in links
    for words, target in links:
        if target.startswith("http"):
            continue
        wanted = os.path.normpath(f"course/{path.parent.relative_to(ROOT).as_posix()}/{target}")
        click = f"[...document.querySelectorAll('.jp-RenderedMarkdown a')].find(a => a.textContent.trim() === {words!r}).click()"
        browser.evaluate(click)
        browser.wait(f"{NOTEBOOK}?.context.path === {wanted!r}")
        open_notebook(browser, lab, path)


@pytest.mark.parametrize("name", ["02_rmsnorm", "11_llama32_inference"])
def test_a_notebook_runs_to_its_end(name, browser, lab, shots):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    open_notebook(browser, lab, path)
    browser.evaluate("window.jupyterapp.commands.execute('notebook:restart-clear-output') && 0")
    button = ".jp-Dialog button.jp-mod-accept"
    browser.wait(
        f"document.querySelector('{button}') && (document.querySelector('{button}').click(), true)"
    )
    browser.wait(f"!document.querySelector('.jp-Dialog') && {FAILED}.length > 10")
    browser.wait(f"{NOTEBOOK}.context.sessionContext.session?.kernel?.status === 'idle'", 90)
    browser.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    browser.wait(f"{NOTEBOOK}.context.sessionContext.session?.kernel?.status === 'idle'", 600)
    browser.wait(f"!{FAILED}.length", 60)
    assert browser.evaluate(FAILED) == []
    browser.picture(shots / f"{name}-run.png", 4000)
