"""MaxText's entry to quantization: the signature of 0.2.5."""


def configure_quantization(config, quant_mode_str="train"):
    return f"MaxText's {config.quantization}" if config.quantization else None
