"""The wrong and the right answers that test_checks.py has judged, one file for each file of checks."""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
