"""How many requests fit and how fast they decode, predicted from bytes: no measurement, no GPU needed."""

from loopkv.capacity.gpus import GPUS, Gpu, custom_gpu, datasheet_bandwidth, get_gpu
from loopkv.capacity.prediction import Arm, Capacity, predict_capacity
from loopkv.capacity.sizes import KNOWN_MODELS, ModelSize, get_model_size, ouro_size

__all__ = [
    "GPUS",
    "KNOWN_MODELS",
    "Arm",
    "Capacity",
    "Gpu",
    "ModelSize",
    "custom_gpu",
    "datasheet_bandwidth",
    "get_gpu",
    "get_model_size",
    "ouro_size",
    "predict_capacity",
]
