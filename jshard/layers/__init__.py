"""Floor 3: Flax NNX modules and functions with explicit collectives."""

from jshard.layers.attention import Attention as Attention
from jshard.layers.attention import attend as attend
from jshard.layers.creating import create as create
from jshard.layers.decoder import Decoder as Decoder
from jshard.layers.gradients import value_and_grad as value_and_grad
from jshard.layers.jitted import jit as jit
from jshard.layers.layer import AuxLoss as AuxLoss
from jshard.layers.layer import Layer as Layer
from jshard.layers.layer_stack import stack as stack
from jshard.layers.linear import MLP as MLP
from jshard.layers.linear import GatedMLP as GatedMLP
from jshard.layers.linear import Linear as Linear
from jshard.layers.matrix_product import choose as choose
from jshard.layers.matrix_product import matmul as matmul
from jshard.layers.moe import MoE as MoE
from jshard.layers.reduce import max as max
from jshard.layers.reduce import mean as mean
from jshard.layers.reduce import sum as sum
from jshard.layers.sharding import shard as shard
from jshard.layers.token_loss import cross_entropy as cross_entropy
from jshard.layers.transfer import place as place
