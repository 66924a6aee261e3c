"""Discrete Fourier transforms along named dims; the other dims are batch dims, and may be split."""

from .ops.fft import fft as fft
from .ops.fft import fftfreq as fftfreq
from .ops.fft import ifft as ifft
from .ops.fft import irfft as irfft
from .ops.fft import rfft as rfft
from .ops.fft import rfftfreq as rfftfreq

# A transform is along one dim or several, so NumPy's names for several are the same functions.
fft2 = fftn = fft
ifft2 = ifftn = ifft
rfft2 = rfftn = rfft
irfft2 = irfftn = irfft
