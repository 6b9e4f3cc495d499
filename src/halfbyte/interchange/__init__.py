"""Models in and out of Hugging Face folders: safetensors, configs, tokenizers, and NVFP4 as serving engines read it.

Read in this order: `tensor_file` (a safetensors file, distrusted), `folder` (a model on disk), `hf_names` and
`hf_config` (theirs and ours), `loading` (in, tensor by tensor), `layouts` and `writing` (out).
"""

from halfbyte.interchange.calibration import calibrate
from halfbyte.interchange.exporting import Exported, Mismatch, Model, export_model
from halfbyte.interchange.folder import Folder, is_folder
from halfbyte.interchange.hf_config import config_from_hf, config_to_hf
from halfbyte.interchange.importing import import_folder
from halfbyte.interchange.loading import load_params
from halfbyte.interchange.opening import LoadedRun, open_model
from halfbyte.interchange.source import Source, open_for_export
