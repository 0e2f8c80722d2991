"""Vision of Kimi K3: the tower (MoonViT-V2), the projector, and the placement of image features among the tokens.

An item is one image (`t = 1`) or the frames of one short clip, cut into `t * h * w` patches. Items run one after the
other: they can never attend to each other, and an item's features have the same bits whatever stands beside it.

Letters of shapes beside those of the style guide: here N patches of one item, D vision width, H heads, K head width,
P patch side, M places after the 2x2 merge, and in `splice_*` B rows, T prompt tokens, S places after the splice.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k3.configuration_kimi_k3 import KimiK3VisionConfig

MAX_GRID_SIDE = 512
IGNORE_INDEX = -100


def frame_code(num_frames: int, dim: int, device: torch.device) -> Tensor:
    """Fixed code of the frame number: `[sin(f w) | cos(f w)]`, `w_i = 10000^(-i / (dim / 2))`.

    Returns: [num_frames, dim] float32.
    """
    omega = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float32, device=device) / (dim // 2))
    angles = torch.outer(torch.arange(num_frames, dtype=torch.float32, device=device), omega)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def rotation_angles(num_frames: int, height: int, width: int, head_dim: int, device: torch.device) -> Tensor:
    """Angles of the 2-D rotation, the same for every frame.

    With `f_i = 10000^(-4i / head_dim)`, pair `2i` of a head turns by `column * f_i` and pair `2i + 1` by `row * f_i`
    (the released docstring says the opposite; its code, followed here, is what the weights were trained with).

    Returns: [num_frames * height * width, head_dim / 2] float32, one angle for each (even, odd) pair.
    """
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim)
    rows = torch.arange(height, dtype=torch.float32, device=device)
    columns = torch.arange(width, dtype=torch.float32, device=device)
    by_column = torch.outer(columns, frequencies).expand(height, width, -1)
    by_row = torch.outer(rows, frequencies).unsqueeze(1).expand(height, width, -1)
    return torch.stack([by_column, by_row], dim=-1).flatten(2).expand(num_frames, -1, -1, -1).flatten(0, 2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the interleaved (even, odd) pairs of x [N, H, K] by angles [N, K / 2]; at least float32 inside."""
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(compute).unsqueeze(1), angles.sin().to(compute).unsqueeze(1)
    even, odd = x.to(compute).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class PositionGrid(nn.Module):
    """Learned position grid, resized to the item's own grid, plus the frame code where there are several frames."""

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.init_pos_emb_height, config.init_pos_emb_width, config.vt_hidden_size)
        )
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, num_frames: int, height: int, width: int) -> Tensor:
        """Positions [t * h * w, D] in the weight's dtype; the resize runs in that dtype too, as in the release."""
        grid_HWD: Tensor = self.weight
        if grid_HWD.shape[:2] != (height, width):
            grid_1DHW = grid_HWD.permute(2, 0, 1).unsqueeze(0)
            resized_1DHW = F.interpolate(grid_1DHW, size=(height, width), mode="bilinear", align_corners=False)
            grid_HWD = resized_1DHW.squeeze(0).permute(1, 2, 0)
        positions_ND = grid_HWD.flatten(0, 1)
        if num_frames == 1:  # no code at all: the code of frame 0 is not zero
            return positions_ND
        code_TD = frame_code(num_frames, positions_ND.shape[-1], positions_ND.device).to(positions_ND.dtype)
        return (positions_ND.unsqueeze(0) + code_TD.unsqueeze(1)).flatten(0, 1)


class PatchEmbed(nn.Module):
    """Patches to vectors, and their positions."""

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        side = config.patch_size
        self.proj = nn.Conv2d(3, config.vt_hidden_size, kernel_size=side, stride=side, bias=False)
        self.pos_emb = PositionGrid(config)

    def forward(self, pixels_N3PP: Tensor, num_frames: int, height: int, width: int) -> Tensor:
        # A convolution with one place is a matrix product; written as one, GPUs do not run it in TF32 by default.
        patches_ND = F.linear(pixels_N3PP.flatten(1), self.proj.weight.flatten(1))
        return patches_ND + self.pos_emb(num_frames, height, width)


class VisionMLP(nn.Module):
    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.vt_hidden_size, config.vt_intermediate_size, bias=False)
        self.fc1 = nn.Linear(config.vt_intermediate_size, config.vt_hidden_size, bias=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x_ND), approximate="tanh"))


class VisionBlock(nn.Module):
    """`x += wo(attention(norm0(x)))`, `x += mlp(norm1(x))`; every patch of the item sees every other.

    The norms are torch's RMSNorm, which multiplies by the weight before it rounds to bfloat16, as the released vision
    code does (its text norms round first).
    """

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.vt_num_attention_heads
        self.norm0 = nn.RMSNorm(config.vt_hidden_size, eps=config.vit_norm_eps)
        self.norm1 = nn.RMSNorm(config.vt_hidden_size, eps=config.vit_norm_eps)
        self.wqkv = nn.Linear(config.vt_hidden_size, 3 * config.qkv_hidden_size, bias=False)
        self.wo = nn.Linear(config.qkv_hidden_size, config.vt_hidden_size, bias=False)
        self.mlp = VisionMLP(config)

    def forward(self, x_ND: Tensor, angles: Tensor) -> Tensor:
        q_NHK, k_NHK, v_NHK = self.wqkv(self.norm0(x_ND)).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q_NHK, k_NHK = rotate(q_NHK, angles), rotate(k_NHK, angles)
        q_1HNK, k_1HNK, v_1HNK = (y_NHK.transpose(0, 1).unsqueeze(0) for y_NHK in (q_NHK, k_NHK, v_NHK))
        o_1HNK = F.scaled_dot_product_attention(q_1HNK, k_1HNK, v_1HNK)
        x_ND = x_ND + self.wo(o_1HNK.squeeze(0).transpose(0, 1).flatten(1))
        return x_ND + self.mlp(self.norm1(x_ND))


class VisionEncoder(nn.Module):
    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.qkv_hidden_size // config.vt_num_attention_heads
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = nn.RMSNorm(config.vt_hidden_size, eps=config.vit_norm_eps)

    def forward(self, x_ND: Tensor, num_frames: int, height: int, width: int) -> Tensor:
        angles = rotation_angles(num_frames, height, width, self.head_dim, x_ND.device)
        for block in self.blocks:
            x_ND = block(x_ND, angles)
        return self.final_layernorm(x_ND)


def pool_frames_and_merge(x_ND: Tensor, num_frames: int, height: int, width: int) -> Tensor:
    """Mean over frames, then 2x2 neighbours side by side: [t * h * w, D] -> [h/2 * w/2, 4, D].

    Places are row-major; in a cell the order is top-left, top-right, bottom-left, bottom-right. (`sd2_tpool`)
    """
    cells = x_ND.view(num_frames, height // 2, 2, width // 2, 2, -1).mean(0)
    return cells.transpose(1, 2).reshape(height // 2 * (width // 2), 4, -1)


class VisionTower(nn.Module):
    """MoonViT-V2: patches and their grids to one feature tensor per item (spec section 8).

    The released norms have no eps of their own; `config.vit_norm_eps` is what torch then takes.
    """

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.max_frames = config.init_pos_emb_time
        self.patch_embed = PatchEmbed(config)
        self.encoder = VisionEncoder(config)

    def forward(self, pixel_values: Tensor, grid_thws: Tensor) -> list[Tensor]:
        """Run the tower over all items, one after the other.

        Args:
            pixel_values: [N, 3, P, P], any float, normalised; the patches of all items, frame by frame and row-major.
                Cast to the dtype of the weights.
            grid_thws: [n, 3] integers: frames, rows and columns of patches; rows and columns even and at most 512.
        Returns: for each item [h/2 * w/2, 4, vt_hidden_size] in the dtype of the weights; the length is free of t.
        Raises: ValueError if a grid cannot be run or the grids do not add up to N.
        """
        grids = self._checked_grids(pixel_values, grid_thws)
        pixel_values = pixel_values.to(self.patch_embed.proj.weight.dtype)
        features = []
        for pixels_N3PP, (t, h, w) in zip(pixel_values.split([t * h * w for t, h, w in grids]), grids):
            x_ND = self.encoder(self.patch_embed(pixels_N3PP, t, h, w), t, h, w)
            features.append(pool_frames_and_merge(x_ND, t, h, w))
        return features

    def _checked_grids(self, pixel_values: Tensor, grid_thws: Tensor) -> list[list[int]]:
        side = self.patch_size
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != (3, side, side):
            raise ValueError(f"VisionTower: want pixel_values [N, 3, {side}, {side}], got {tuple(pixel_values.shape)}")
        if not pixel_values.is_floating_point():
            raise ValueError(f"VisionTower: want normalised float pixel_values, got {pixel_values.dtype}")
        if grid_thws.ndim != 2 or grid_thws.shape[1] != 3 or grid_thws.is_floating_point():
            raise ValueError(
                "VisionTower: want integer grid_thws [n, 3] (frames, rows, columns), "
                f"got {grid_thws.dtype} {tuple(grid_thws.shape)}"
            )
        grids: list[list[int]] = grid_thws.tolist()
        for t, h, w in grids:
            if not 1 <= t <= self.max_frames:
                raise ValueError(f"VisionTower: want 1 to {self.max_frames} frames in grid_thws, got {[t, h, w]}")
            if any(not 2 <= n <= MAX_GRID_SIDE or n % 2 for n in (h, w)):
                raise ValueError(
                    f"VisionTower: want even rows and columns from 2 to {MAX_GRID_SIDE} in grid_thws, got {[t, h, w]}"
                )
        patches = sum(t * h * w for t, h, w in grids)
        if patches != pixel_values.shape[0]:
            raise ValueError(
                f"VisionTower: grid_thws count {patches} patches, pixel_values has {pixel_values.shape[0]}"
            )
        return grids


class PatchMergerProjector(nn.Module):
    """Merged 2x2 patches to the width of the text model: `post_norm(proj.2(gelu(proj.0(x))))`, the exact (erf) GELU."""

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        merged = 4 * config.mm_hidden_size
        self.proj = nn.Sequential(
            nn.Linear(merged, merged, bias=False), nn.GELU(), nn.Linear(merged, config.text_hidden_size, bias=False)
        )
        self.post_norm = nn.RMSNorm(config.text_hidden_size, eps=config.projector_ln_eps)

    def forward(self, x: Tensor) -> Tensor:
        """[M, 4, mm_hidden_size] of one item -> [M, text_hidden_size], in the dtype of the weights."""
        return self.post_norm(self.proj(x.flatten(1)))


class SplicedPrompt(NamedTuple):
    """A batch after its image placeholders were replaced by image features; S places in every row."""

    inputs_embeds: Tensor  # [B, S, D], zeros where attention_mask is 0
    attention_mask: Tensor  # [B, S] int64
    labels: Tensor | None  # [B, S], -100 on image places and padding
    position_ids: Tensor  # [B, S] int64, counted over real places; 1 where attention_mask is 0


def expand_placeholders(input_ids: Tensor, image_lengths: list[int], media_token_id: int) -> tuple[Tensor, Tensor]:
    """Where every place of a packed prompt comes from, once each placeholder has grown to its image's length.

    Args:
        input_ids: [T] integers, any number of sequences one behind the other.
        image_lengths: places each image takes, in the order of the placeholders.
        media_token_id: the id that stands once for each image.
    Returns: token_index [S] int64, the prompt token a place comes from (an image place: its placeholder), and
        is_image [S] bool. So `labels[token_index]` and a running count of S per sequence follow the splice.
    Raises: ValueError naming both numbers if there are not as many placeholders as images.
    """
    if input_ids.ndim != 1:
        raise ValueError(f"expand_placeholders: want input_ids [T], got {tuple(input_ids.shape)}")
    is_placeholder_T = input_ids == media_token_id
    num_placeholders = int(is_placeholder_T.sum())
    if num_placeholders != len(image_lengths):
        raise ValueError(
            f"input_ids holds {num_placeholders} image placeholders (id {media_token_id}), "
            f"but {len(image_lengths)} images were given"
        )
    places_T = torch.ones(input_ids.shape, dtype=torch.int64, device=input_ids.device)
    places_T[is_placeholder_T] = torch.tensor(image_lengths, dtype=torch.int64, device=input_ids.device)
    token_index_S = torch.repeat_interleave(places_T)
    return token_index_S, is_placeholder_T[token_index_S]


def splice_packed(
    input_ids: Tensor, features: list[Tensor], inputs_embeds: Tensor, media_token_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Put image features in the place of their placeholders in a packed prompt.

    Args:
        input_ids: [T].     inputs_embeds: [T, D]; the rows of placeholders are not read.
        features: for each image [n, D], in order; cast to the dtype of inputs_embeds.
    Returns: embeds [S, D], S = T + sum(n - 1), and token_index [S], is_image [S] of `expand_placeholders`.
    Raises: ValueError if shapes disagree or there are not as many placeholders as images.
    """
    if inputs_embeds.shape[:-1] != input_ids.shape:
        raise ValueError(
            f"splice_packed: want inputs_embeds {[*input_ids.shape, 'D']}, got {tuple(inputs_embeds.shape)}"
        )
    for image, rows in enumerate(features):
        if rows.ndim != 2 or rows.shape[1] != inputs_embeds.shape[-1] or not rows.shape[0]:
            raise ValueError(
                f"splice_packed: want features[{image}] [n >= 1, {inputs_embeds.shape[-1]}], got {tuple(rows.shape)}"
            )
    token_index_S, is_image_S = expand_placeholders(input_ids, [rows.shape[0] for rows in features], media_token_id)
    embeds_SD = inputs_embeds[token_index_S]
    if features:
        image_places = is_image_S.nonzero().squeeze(1)
        embeds_SD = embeds_SD.index_copy(0, image_places, torch.cat(features).to(embeds_SD))
    return embeds_SD, token_index_S, is_image_S


def splice_image_features(
    input_ids: Tensor,
    features: list[Tensor],
    inputs_embeds: Tensor,
    media_token_id: int,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
) -> SplicedPrompt:
    """Put image features in the place of their placeholders, row by row, and pad the rows to one length.

    Every row grows in place and keeps its own padding; rows that end up shorter are padded further, on the right if
    some row ends in padding, else on the left. (The released code misplaces features where right-padded rows grow to
    different lengths; here they stand at their placeholders.)

    Args:
        input_ids: [B, T] with one `media_token_id` for each image; placeholders under mask 0 are padding.
        features: for each image [n, D], row by row, in order within a row.
        inputs_embeds: [B, T, D].
        attention_mask: [B, T], 1 = real; None = all real. With a cache: the part for these tokens.
        labels: [B, T], unshifted, or None.
    Returns: SplicedPrompt with rows of S = the largest T + sum(n - 1) over the rows.
    Raises: ValueError if shapes disagree or there are not as many placeholders as images.
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"splice_image_features: want input_ids [B >= 1, T >= 1], got {tuple(input_ids.shape)}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    for name, tensor in (("attention_mask", attention_mask), ("labels", labels), ("inputs_embeds", inputs_embeds)):
        if tensor is not None and tensor.shape[:2] != input_ids.shape:
            raise ValueError(
                f"splice_image_features: want {name} with the {tuple(input_ids.shape)} of input_ids, "
                f"got {tuple(tensor.shape)}"
            )
    batch, tokens = input_ids.shape
    is_real_T = attention_mask.flatten() != 0
    # -1 is no token: a placeholder under mask 0 takes one place, as any padding does
    ids_T = input_ids.flatten().masked_fill(~is_real_T, -1)
    embeds_SD, token_index_S, is_image_S = splice_packed(ids_T, features, inputs_embeds.flatten(0, 1), media_token_id)

    row_S = token_index_S // tokens
    row_lengths_B = torch.bincount(row_S, minlength=batch)
    length = int(row_lengths_B.max())
    place_S = torch.arange(len(row_S), device=row_S.device) - (row_lengths_B.cumsum(0) - row_lengths_B)[row_S]
    if bool(attention_mask[:, -1].all()):
        place_S = place_S + (length - row_lengths_B)[row_S]
    is_real_S = is_real_T[token_index_S]
    row_S, place_S = row_S[is_real_S], place_S[is_real_S]  # padding is what is not written below

    new_embeds_BSD = embeds_SD.new_zeros(batch, length, embeds_SD.shape[-1])
    new_embeds_BSD = new_embeds_BSD.index_put((row_S, place_S), embeds_SD[is_real_S])
    new_mask_BS = torch.zeros(batch, length, dtype=torch.int64, device=input_ids.device)
    new_mask_BS[row_S, place_S] = 1
    new_labels_BS = None
    if labels is not None:
        labels_S = labels.flatten()[token_index_S].masked_fill(is_image_S, IGNORE_INDEX)
        new_labels_BS = labels.new_full((batch, length), IGNORE_INDEX)
        new_labels_BS[row_S, place_S] = labels_S[is_real_S]
    position_ids_BS = (new_mask_BS.cumsum(1) - 1).masked_fill(new_mask_BS == 0, 1)
    return SplicedPrompt(new_embeds_BSD, new_mask_BS, new_labels_BS, position_ids_BS)
