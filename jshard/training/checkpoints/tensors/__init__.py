"""Tensors of files: what a file says that it has, what is seen of it, and which parameter that becomes."""

from jshard.training.checkpoints.tensors.rename import Renaming as Renaming
from jshard.training.checkpoints.tensors.safetensors import FileTensor as FileTensor
from jshard.training.checkpoints.tensors.view import View as View
