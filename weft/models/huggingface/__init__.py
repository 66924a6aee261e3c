"""Hugging Face checkpoints (safetensors) of T5 v1.0 and v1.1, GPT-2 and Llama, and their tokenizers."""

from .convert import config_of as config_of
from .convert import load as load
from .convert import save as save
from .tokenizer import tokenizer as tokenizer
