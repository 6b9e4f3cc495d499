"""Models in and out of Hugging Face folders: safetensors, configs, tokenizers, and NVFP4 as serving engines read it.

Read in this order: `hf_folder` (a model on disk and its safetensors files, untrusted), `hf_config` and `tensor_layouts`
(their names and layouts, and ours), `load_weights` (import, tensor by tensor), `exporter` (export).
"""

from halfbyte.hf.calibration import ExportSource, calibrate_input_amax, open_export_source
from halfbyte.hf.exporter import ExportModel, ExportResult, FusedScaleMismatch, export_model
from halfbyte.hf.hf_config import config_from_hf, config_to_hf
from halfbyte.hf.hf_folder import HfFolder, is_hf_folder
from halfbyte.hf.import_model import import_hf_folder
from halfbyte.hf.load_weights import load_params
from halfbyte.hf.model_loading import LoadedModel, open_model
