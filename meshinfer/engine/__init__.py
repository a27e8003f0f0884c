"""How numbers move: loading, stages, sampling. The one room that knows MLX."""
