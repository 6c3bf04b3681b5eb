"""Faster equivalents of `Ops` for each backend, and `best`, which selects them."""

from jaxgpt.kernels.balance import Halos as Halos
from jaxgpt.kernels.balance import halos_of as halos_of
from jaxgpt.kernels.balance import in_balanced_order as in_balanced_order
from jaxgpt.kernels.choose import CPU as CPU
from jaxgpt.kernels.choose import GPU as GPU
from jaxgpt.kernels.choose import KERNELS as KERNELS
from jaxgpt.kernels.choose import PLAIN as PLAIN
from jaxgpt.kernels.choose import Target as Target
from jaxgpt.kernels.choose import best as best
from jaxgpt.kernels.choose import choose_attention as choose_attention
from jaxgpt.kernels.choose import of_device as of_device
from jaxgpt.kernels.context import CONTEXT_KERNELS as CONTEXT_KERNELS
from jaxgpt.kernels.context import MOST_GATHERED as MOST_GATHERED
from jaxgpt.kernels.context import ChosenAttention as ChosenAttention
