"""Mamba language models on NumPy and wgpu: exact gradients, training, evaluation, generation."""
