"""Draw arrays as figures: attention, logit lens, patching, and the losses or rewards of runs.

Each function returns a matplotlib `Figure`, which needs no display: `figure.savefig("a.png")` or `"a.svg"`. The first call
imports matplotlib.
"""

from jaxgpt.study.heatmaps import attention, lens, patching
from jaxgpt.study.run_figures import losses, rewards

__all__ = ["attention", "lens", "losses", "patching", "rewards"]
