import torch
from checks import LARGEST_ERRORS
from hypothesis import settings

# The same examples on every machine and run: a failure is found again by running the test again.
settings.register_profile("lab", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("lab")
torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_terminal_summary(terminalreporter):
    """What exact meant in this run: the largest difference seen for each class of models."""
    if LARGEST_ERRORS:
        terminalreporter.section("largest errors, on logits of standard deviation 10")
        for label, error in sorted(LARGEST_ERRORS.items()):
            terminalreporter.line(f"{error:8.1e}  {label}")
