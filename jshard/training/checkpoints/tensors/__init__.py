"""Tensors in weight files: the file format, views of tensors, and their assignment to parameters."""

from jshard.training.checkpoints.tensors.rename import Renaming as Renaming
from jshard.training.checkpoints.tensors.safetensors import FileTensor as FileTensor
from jshard.training.checkpoints.tensors.view import View as View
