"""Images to what the vision tower reads: resize, fill of transparency, padding, patches (spec section 8).

Pillow is the extra `vision`; it is imported where an image is first opened.
"""

import hashlib
import io
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

CONFIG_FILE = "preprocessor_config.json"


def _pil_image() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('KimiK3ImageProcessor needs Pillow: pip install "kimi-k3[vision]"') from error
    return Image


def image_prompt(width: int, height: int) -> str:
    """The text of one image in a prompt, with the size in pixels before any resize; one pad for the whole image."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def image_hash(pixel_values: Tensor, grid_thw: Tensor) -> str:
    """Identity of what the tower sees: SHA-256, 64 hex digits, over the grid and every patch value.

    Placeholders of all images share one token id, so whatever is keyed by tokens needs this hash beside them.

    Args:
        pixel_values: [t * h * w, 3, P, P] of one item, hashed as float32.     grid_thw: [3] integers.
    """
    digest = hashlib.sha256(np.asarray(grid_thw.tolist(), dtype="<i8").tobytes())
    digest.update(np.ascontiguousarray(pixel_values.detach().float().cpu().numpy(), dtype="<f4").data)
    return digest.hexdigest()


@dataclass(frozen=True)
class ImageInputs:
    """What `KimiK3ImageProcessor` makes of n images."""

    pixel_values: Tensor  # [N, 3, P, P] float32, the patches of all images one behind the other
    grid_thws: Tensor  # [n, 3] int64: 1, rows, columns of patches
    num_tokens: list[int]  # places each image takes among the tokens
    prompts: list[str]  # the text of each image
    hashes: list[str]  # SHA-256 of each image's grid and patches, 64 hex digits


@dataclass(frozen=True)
class ResizePlan:
    """How an image is brought to whole patches; sizes in pixels."""

    width: int
    height: int
    pad_right: int
    pad_bottom: int


@dataclass(frozen=True)
class KimiK3ImageProcessor:
    """The released image rules; the defaults are the released values.

        processor = KimiK3ImageProcessor.from_pretrained(folder)
        inputs = processor([image, "photo.png"])

    A call takes Pillow images, paths, or the bytes of image files, and returns `ImageInputs`. EXIF rotation is not
    applied, as in the release.
    """

    patch_size: int = 14
    merge_kernel_size: int = 2
    in_patch_limit: int = 65536  # bounds whole patches before padding: a padded grid may pass it
    patch_limit_on_one_side: int = 512
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    chessboard_square_size: int = 8
    chessboard_square_on_top_left: bool = True
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 180

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, **hub_options: Any) -> Self:
        """Read preprocessor_config.json of a folder or a Hub repository.

        Takes `revision`, `cache_dir`, `token`, `local_files_only`. Raises ValueError naming the key for rules that are
        not built here.
        """
        from kimi_k3.checkpoint import resolve_file

        return cls.from_dict(json.loads(resolve_file(path_or_repo, CONFIG_FILE, **hub_options).read_text("utf-8")))

    @classmethod
    def from_dict(cls, preprocessor_config: dict[str, Any]) -> Self:
        """Take the image rules out of the contents of `preprocessor_config.json`; keys for video are not read."""
        rules = _required(preprocessor_config, "media_proc_cfg")
        background = _required(rules, "transparent_bg_config")
        for holder, key, built in (
            (rules, "fixed_output_tokens", None),
            (rules, "transparent_bg_fill_stage", "after_resize"),
            (background, "pattern", "chessboard"),
        ):
            if _required(holder, key) != built:
                raise ValueError(f"{CONFIG_FILE}: {key}: only {built!r} is built, got {holder[key]!r}")
        return cls(
            patch_size=_required(rules, "patch_size"),
            merge_kernel_size=_required(rules, "merge_kernel_size"),
            in_patch_limit=_required(rules, "in_patch_limit"),
            patch_limit_on_one_side=_required(rules, "patch_limit_on_one_side"),
            image_mean=_three_numbers(rules, "image_mean"),
            image_std=_three_numbers(rules, "image_std"),
            chessboard_square_size=_required(background, "chessboard_square_size"),
            chessboard_square_on_top_left=_required(background, "chessboard_square_on_top_left"),
            chessboard_white_value=_required(background, "chessboard_white_value"),
            chessboard_gray_value=_required(background, "chessboard_gray_value"),
        )

    def resize_plan(self, width: int, height: int) -> ResizePlan:
        """New size and padding of an image of width x height pixels.

        s = min(1, sqrt(in_patch_limit / (max(1, w // 14) max(1, h // 14))), 512 * 14 / w, 512 * 14 / h)
        w' = min(max(1, int(w s)), 512 * 14), h' likewise; then padded right and bottom to multiples of 28
        """
        if width < 1 or height < 1:
            raise ValueError(f"KimiK3ImageProcessor: want an image of at least 1x1 pixels, got {width}x{height}")
        largest = self.patch_limit_on_one_side * self.patch_size
        patches = max(1, width // self.patch_size) * max(1, height // self.patch_size)
        # int() cuts a double product: 100000 x 7 becomes 7167 wide, not 7168, and the release does the same
        scale = min(1.0, math.sqrt(self.in_patch_limit / patches), largest / width, largest / height)
        new_width, new_height = (min(max(1, int(side * scale)), largest) for side in (width, height))
        multiple = self.patch_size * self.merge_kernel_size
        return ResizePlan(new_width, new_height, -new_width % multiple, -new_height % multiple)

    def num_tokens(self, width: int, height: int) -> int:
        """Places an image of width x height pixels takes among the tokens."""
        plan = self.resize_plan(width, height)
        multiple = self.patch_size * self.merge_kernel_size
        return (plan.width + plan.pad_right) // multiple * ((plan.height + plan.pad_bottom) // multiple)

    def __call__(self, images: "list[Image | str | os.PathLike[str] | bytes]") -> ImageInputs:
        """Preprocess images; the fields of the result are in their order.

        Raises: ImportError without Pillow; ValueError for anything that is not an image, or an empty list.
        """
        if not isinstance(images, list | tuple) or not images:
            raise ValueError(f"KimiK3ImageProcessor: want a list of at least one image, got {images!r}")
        pixel_values, grids, num_tokens, prompts, hashes = [], [], [], [], []
        for given in images:
            image = open_image(given)
            patches = torch.from_numpy(self._normalised_patches(image))
            plan = self.resize_plan(*image.size)
            rows = (plan.height + plan.pad_bottom) // self.patch_size
            grid = torch.tensor([1, rows, patches.shape[0] // rows])
            pixel_values.append(patches)
            grids.append(grid)
            num_tokens.append(self.num_tokens(*image.size))
            prompts.append(image_prompt(*image.size))
            hashes.append(image_hash(patches, grid))
        return ImageInputs(torch.cat(pixel_values), torch.stack(grids), num_tokens, prompts, hashes)

    def _normalised_patches(self, image: "Image") -> np.ndarray:
        plan = self.resize_plan(*image.size)
        # Pillow resizes in the image's own mode: alpha premultiplied, palette indices by nearest neighbour
        resized = image.resize((plan.width, plan.height), _pil_image().Resampling.BICUBIC)
        if resized.has_transparency_data:
            pixels_HW3 = self._on_chessboard(np.asarray(resized.convert("RGBA")))
        else:
            pixels_HW3 = np.asarray(resized.convert("RGB"))
        pixels_HW3 = np.pad(pixels_HW3, ((0, plan.pad_bottom), (0, plan.pad_right), (0, 0)))
        side = self.patch_size
        rows, columns = pixels_HW3.shape[0] // side, pixels_HW3.shape[1] // side
        patches_N3PP = (
            pixels_HW3.reshape(rows, side, columns, side, 3)
            .transpose(0, 2, 4, 1, 3)
            .reshape(rows * columns, 3, side, side)
        )
        mean, std = (np.asarray(x, dtype=np.float32).reshape(3, 1, 1) for x in (self.image_mean, self.image_std))
        return (patches_N3PP.astype(np.float32) / np.float32(255) - mean) * (np.float32(1) / std)

    def _on_chessboard(self, rgba_HW4: np.ndarray) -> np.ndarray:
        height, width = rgba_HW4.shape[:2]
        square = self.chessboard_square_size
        is_odd_HW = (np.arange(height)[:, None] // square + np.arange(width) // square) % 2 == 1
        is_white_HW = is_odd_HW != self.chessboard_square_on_top_left
        board_HW = np.where(is_white_HW, self.chessboard_white_value, self.chessboard_gray_value).astype(np.float32)
        alpha_HW1 = rgba_HW4[..., 3:].astype(np.float32) / np.float32(255)
        # float32 throughout and cut, not rounded, as the release: rounding differs in a fifth to a half of the bytes
        mixed_HW3 = alpha_HW1 * rgba_HW4[..., :3].astype(np.float32) + (1 - alpha_HW1) * board_HW[..., None]
        return mixed_HW3.astype(np.uint8)


def open_image(image: "Image | str | os.PathLike[str] | bytes") -> "Image":
    """A Pillow image from a Pillow image, a path, or the bytes of an image file (the first frame, if it has several).

    Raises: ImportError without Pillow; ValueError naming what was given if it is none of these or cannot be read.
    """
    pil_image = _pil_image()
    if isinstance(image, pil_image.Image):
        image.load()
        return image
    if not isinstance(image, str | os.PathLike | bytes):
        raise ValueError(f"open_image: want a Pillow image, a path or bytes (images only), got {type(image).__name__}")
    # a file is read whole, so that no handle outlives this call
    content = image if isinstance(image, bytes) else Path(image).read_bytes()
    named = "the given bytes" if isinstance(image, bytes) else os.fspath(image)
    try:
        opened = pil_image.open(io.BytesIO(content))
    except pil_image.UnidentifiedImageError as error:
        raise ValueError(f"open_image: {named}: not an image that Pillow can read") from error
    try:
        opened.load()
    except (OSError, SyntaxError, pil_image.DecompressionBombError) as error:  # cut off, damaged, or absurdly large
        raise ValueError(f"open_image: {named}: a damaged image: {error}") from error
    return opened


def _required(holder: dict[str, Any], key: str) -> Any:
    if key not in holder:
        raise ValueError(f"{CONFIG_FILE}: key {key} is missing")
    return holder[key]


def _three_numbers(holder: dict[str, Any], key: str) -> tuple[float, float, float]:
    values = _required(holder, key)
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError(f"{CONFIG_FILE}: {key}: want three numbers, got {values!r}")
    red, green, blue = values
    return red, green, blue
