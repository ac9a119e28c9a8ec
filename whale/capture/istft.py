"""`torch.istft` of operations that a graph can hold: torch's own reads the sum of the windows, to
raise where it is nearly zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NO_WINDOW = 1e-11
"""torch raises where the sum of the squared windows is less"""


def istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """The signal (sample, time) or (time) of a spectrum (sample, frequency, frame) or (frequency,
    frame); NaN where no window reaches, which stops the step.
    """
    hop = n_fft // 4 if hop_length is None else hop_length
    frames = _frames(input, n_fft, normalized, onesided, return_complex)
    weights = _centred_window(frames, n_fft, win_length, window)
    signal = _overlapped(frames * weights, n_fft, hop)
    num_frames = frames.shape[1]
    overlap = _overlapped(weights.square().expand(1, num_frames, n_fft), n_fft, hop)
    overlap = torch.where(overlap.abs() < NO_WINDOW, float("nan"), overlap)

    full_length = n_fft + hop * (num_frames - 1)
    start = n_fft // 2 if center else 0
    if length is None:
        stop = full_length - n_fft // 2 if center else full_length
    else:
        stop = start + length
    signal = signal[:, start:stop] / overlap[:, start:stop]
    if stop > full_length:
        signal = F.pad(signal, (0, stop - full_length))
    return signal.squeeze(0) if input.ndim == 2 else signal


def _frames(
    input: Tensor, n_fft: int, normalized: bool, onesided: bool | None, return_complex: bool
) -> Tensor:
    """(sample, frame, time within the frame)"""
    num_frequencies = input.shape[-2]
    if onesided is None:
        onesided = num_frequencies != n_fft
    if num_frequencies != (n_fft // 2 + 1 if onesided else n_fft):
        raise ValueError(f"istft: {num_frequencies} frequencies do not fit n_fft={n_fft}")
    if return_complex and onesided:
        raise ValueError("istft: a signal of complex values needs onesided=False")
    spectrum = input.unsqueeze(0) if input.ndim == 2 else input
    spectrum = spectrum.transpose(1, 2)
    norm = "ortho" if normalized else None
    if return_complex:
        return torch.fft.ifft(spectrum, dim=-1, norm=norm)
    return torch.fft.irfft(spectrum[..., : n_fft // 2 + 1], n_fft, dim=-1, norm=norm)


def _centred_window(
    frames: Tensor, n_fft: int, win_length: int | None, window: Tensor | None
) -> Tensor:
    """(time within the frame): the window with zeros on both sides"""
    size = n_fft if win_length is None else win_length
    if window is None:
        real = frames.real if frames.is_complex() else frames
        window = torch.ones(size, dtype=real.dtype, device=frames.device)
    if window.shape != (size,):
        raise ValueError(f"istft: the window has the shape {list(window.shape)}, not [{size}]")
    left = (n_fft - size) // 2
    return F.pad(window, (left, n_fft - size - left))


def _overlapped(frames: Tensor, n_fft: int, hop: int) -> Tensor:
    """(sample, time): the frames, each `hop` after the one before, added up"""
    full_length = n_fft + hop * (frames.shape[1] - 1)
    columns = frames.transpose(1, 2)  # (sample, time within the frame, frame)
    return F.fold(columns, (1, full_length), (1, n_fft), stride=(1, hop)).flatten(1)
