"""Twins of GELU, SiLU and SwiGLU."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from helpers.checks import check_gelu, check_silu, check_swiglu
from helpers.feed_forward import GELU, FeedForward, SiLU
from twins.registry import accepted, proves, refused

proves(check_gelu, GELU, "GELU: right, in float32 and bfloat16")
proves(check_silu, SiLU, "SiLU: right, in float32 and bfloat16")
proves(check_swiglu, FeedForward, "SwiGLU: right, in float32 and bfloat16")


# --- GELU and SiLU ----------


@accepted(check_gelu)
def gelu_of_gpt2(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


@accepted(check_gelu)
class BookGELU(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


@accepted(check_gelu)
class TanhGELUOfTorch(nn.GELU):
    def __init__(self):
        super().__init__(approximate="tanh")


@accepted(check_gelu)
def gelu_by_sigmoid(x):  # (1 + tanh(a)) / 2 = sigmoid(2 a)
    wide = x.float()
    return (wide * torch.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide**3))).to(x.dtype)


@refused(check_gelu, "the exact GELU with erf")
def erf_form(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@refused(check_gelu, "the exact GELU with erf")
class ExactGELUOfTorch(nn.GELU):
    pass


@refused(check_gelu, "x * sigmoid(1.702 x), another approximation")
def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


@refused(check_gelu, "The factor 0.5 is missing")
def half_missing(x):
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@refused(check_gelu, "The cubic term 0.044715 x^3 is missing")
def cubic_missing(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x))


@refused(check_gelu, "0.44715 instead of 0.044715")
def cubic_ten_times(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.44715 * x**3)))


@refused(check_gelu, "The third power of x is wanted")
def square_for_cube(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**2)))


@refused(check_gelu, "The root is missing: the factor is sqrt(2 / pi)")
def root_missing(x):
    return 0.5 * x * (1 + torch.tanh((2 / math.pi) * (x + 0.044715 * x**3)))


@refused(check_gelu, "The factor sqrt(2 / pi) is missing")
def factor_missing(x):
    return 0.5 * x * (1 + torch.tanh(x + 0.044715 * x**3))


@refused(check_gelu, "brackets around the sum")
def brackets_inside_missing(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x + 0.044715 * x**3))


@refused(check_gelu, "The 1 inside 0.5 x (1 + tanh(...)) is missing")
def one_missing(x):
    return 0.5 * x * torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@refused(check_gelu, "Brackets are missing: 0.5 x (1 + tanh(...))")
def brackets_missing(x):
    return 0.5 * x * 1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@refused(check_gelu, "The factor x in front is missing")
def probability_alone(x):
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@refused(check_gelu, "x comes back as it is")
def gelu_unchanged(x):
    return x


@refused(check_gelu, "This is ReLU")
class ReLU(nn.Module):
    def forward(self, x):
        return torch.clamp(x, min=0)


@refused(check_gelu, "This is SiLU")
def silu_for_gelu(x):
    return x / (1 + torch.exp(-x))


@refused(check_gelu, "This is tanh")
class Tanh(nn.Tanh):
    pass


@refused(check_gelu, "bfloat16 went in and float32 came out")
def gelu_not_cast_back(x):
    return F.gelu(x.float(), approximate="tanh")


@refused(check_gelu, "In float32 it is right, so something is rounded too much")
def gelu_of_coarse_bfloat16(x):
    step = 2**-7 if x.dtype == torch.float32 else 2**-3
    rounded = x if x.dtype == torch.float32 else (x / step).round() * step
    return F.gelu(rounded, approximate="tanh")


@refused(check_gelu, "your code changes its input")
def gelu_in_place(x):
    return x.mul_(0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


@refused(check_gelu, "must begin with super().__init__()")
class GELUWithoutSuper(nn.Module):
    def __init__(self):
        pass

    def forward(self, x):
        return F.gelu(x, approximate="tanh")


@refused(check_gelu, "GELU: the shape is (401, 1), expected (401,)")
def gelu_with_an_axis_more(x):
    return F.gelu(x, approximate="tanh")[..., None]


@accepted(check_silu)
def silu_by_exp(x):
    return x / (1 + torch.exp(-x))


@accepted(check_silu)
class SiLUByTanh(nn.Module):
    def forward(self, x):
        return (0.5 * x.float() * (1 + torch.tanh(x.float() / 2))).to(x.dtype)


@accepted(check_silu)
class SiLUOfTorch(nn.SiLU):
    pass


@refused(check_silu, "The factor x is missing")
class SigmoidAlone(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x)


@refused(check_silu, "The sign in the exponent is wrong")
def wrong_sign(x):
    return x / (1 + torch.exp(x))


@refused(check_silu, "x * sigmoid(1.702 x), the approximation of GELU")
def quick_gelu_for_silu(x):
    return x * torch.sigmoid(1.702 * x)


@refused(check_silu, "This is x * tanh(x)")
def tanh_for_sigmoid(x):
    return x * torch.tanh(x)


@refused(check_silu, "This is GELU")
class GELUForSiLU(nn.GELU):
    pass


@refused(check_silu, "This is GELU")
def tanh_gelu_for_silu(x):
    return gelu_of_gpt2(x)


@refused(check_silu, "x comes back as it is")
def silu_unchanged(x):
    return x


@refused(check_silu, "This is ReLU")
class ReLUForSiLU(nn.ReLU):
    pass


@refused(check_silu, "This is Mish")
def mish(x):
    return x * torch.tanh(torch.log(1 + torch.exp(x)))


@refused(check_silu, "hard swish")
def hard_swish(x):
    return x * (x + 3).clamp(0, 6) / 6


@refused(check_silu, "a power of e overflows")
def overflowing(x):
    return x * torch.exp(x) / (1 + torch.exp(x))


@refused(check_silu, "bfloat16 went in and float32 came out")
def silu_not_cast_back(x):
    return F.silu(x.float())


@refused(check_silu, "your code changes its input")
class InPlaceSiLU(nn.SiLU):
    def __init__(self):
        super().__init__(inplace=True)


@refused(check_silu, "The tanh takes x; sigmoid(x) is half of 1 + tanh(x / 2)")
def tanh_of_x(x):
    return 0.5 * x * (1 + torch.tanh(x))


# --- SwiGLU ----------


class Matrices(nn.Module):
    """The constructor of a SwiGLU feed-forward; the twins add the forward pass."""

    def __init__(self, cfg):
        super().__init__()
        sizes = cfg["emb_dim"], cfg["hidden_dim"]
        self.fc1 = nn.Linear(*sizes, dtype=cfg["dtype"], bias=False)
        self.fc2 = nn.Linear(*sizes, dtype=cfg["dtype"], bias=False)
        self.fc3 = nn.Linear(*sizes[::-1], dtype=cfg["dtype"], bias=False)


@accepted(check_swiglu)
class BookFeedForward(Matrices):
    def forward(self, x):
        x_fc1 = self.fc1(x)
        x_fc2 = self.fc2(x)
        x = F.silu(x_fc1) * x_fc2
        return self.fc3(x)


@accepted(check_swiglu)
class SwiGLUByEinsum(Matrices):
    def forward(self, x):
        gate = torch.einsum("...d,fd->...f", x, self.fc1.weight)
        value = torch.einsum("...d,fd->...f", x, self.fc2.weight)
        return torch.einsum("...f,...f,df->...d", gate * gate.sigmoid(), value, self.fc3.weight)


@accepted(check_swiglu)
class SwiGLUWithOneWideMatrix(Matrices):
    def forward(self, x):
        both = F.linear(x, torch.cat([self.fc1.weight, self.fc2.weight]))
        gate, value = both.chunk(2, dim=-1)
        return F.linear(gate / (1 + torch.exp(-gate)) * value, self.fc3.weight)


@refused(check_swiglu, "Gate and value are exchanged")
class GateOnFc2(Matrices):
    def forward(self, x):
        return self.fc3(self.fc1(x) * F.silu(self.fc2(x)))


@refused(check_swiglu, "The activation is missing")
class Bilinear(Matrices):
    def forward(self, x):
        return self.fc3(self.fc1(x) * self.fc2(x))


@refused(check_swiglu, "SiLU is applied to the product")
class SiLUOfTheProduct(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x) * self.fc2(x)))


@refused(check_swiglu, "SiLU is applied to both sides")
class SiLUTwice(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x)) * F.silu(self.fc2(x)))


@refused(check_swiglu, "Gate and value are added")
class Sum(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x)) + self.fc2(x))


@refused(check_swiglu, "The gate is a sigmoid (GLU)")
class GLU(Matrices):
    def forward(self, x):
        return self.fc3(torch.sigmoid(self.fc1(x)) * self.fc2(x))


@refused(check_swiglu, "The gate is GELU (GeGLU)")
class GeGLU(Matrices):
    def forward(self, x):
        return self.fc3(F.gelu(self.fc1(x)) * self.fc2(x))


@refused(check_swiglu, "The gate is GELU (GeGLU)")
class GeGLUOfGemma(Matrices):
    def forward(self, x):
        return self.fc3(gelu_of_gpt2(self.fc1(x)) * self.fc2(x))


@refused(check_swiglu, "The gate is ReLU")
class ReGLU(Matrices):
    def forward(self, x):
        return self.fc3(torch.relu(self.fc1(x)) * self.fc2(x))


@refused(check_swiglu, "The value is not used")
class TwoMatrices(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x)))


@refused(check_swiglu, "fc1 is used for gate and value")
class Fc1Twice(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x)) * self.fc1(x))


@refused(check_swiglu, "fc2 is used for gate and value")
class Fc2Twice(Matrices):
    def forward(self, x):
        return self.fc3(F.silu(self.fc2(x)) * self.fc2(x))


@refused(check_swiglu, "SiLU comes after fc3")
class SiLUAtTheEnd(Matrices):
    def forward(self, x):
        return F.silu(self.fc3(self.fc1(x) * self.fc2(x)))


@refused(check_swiglu, "The input is added: that is the block's task")
class ShortcutInside(BookFeedForward):
    def forward(self, x):
        return x + super().forward(x)


@refused(check_swiglu, "x comes back as it is")
class FeedForwardUnchanged(Matrices):
    def forward(self, x):
        return x


@refused(check_swiglu, "fc3 is missing")
class NotNarrowed(Matrices):
    def forward(self, x):
        return F.silu(self.fc1(x)) * self.fc2(x)


@refused(check_swiglu, "a parameter 'fc1.bias' too many. SwiGLU has three matrices and no biases")
class Biases(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fc1 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], dtype=cfg["dtype"])
        self.fc2 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], dtype=cfg["dtype"])
        self.fc3 = nn.Linear(cfg["hidden_dim"], cfg["emb_dim"], dtype=cfg["dtype"])

    def forward(self, x):
        return self.fc3(F.silu(self.fc1(x)) * self.fc2(x))


@refused(check_swiglu, "needs a parameter 'fc1.weight'; it has w1.weight, w2.weight, w3.weight")
class NamedAsByMeta(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.w1 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], bias=False)
        self.w2 = nn.Linear(cfg["hidden_dim"], cfg["emb_dim"], bias=False)
        self.w3 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@refused(check_swiglu, "fc1.weight of FourTimesWider has shape (96, 24), expected (40, 24)")
class FourTimesWider(BookFeedForward):
    def __init__(self, cfg):
        super().__init__({**cfg, "hidden_dim": 4 * cfg["emb_dim"]})


@refused(check_swiglu, "fc1.weight of SizesExchanged has shape (24, 40), expected (40, 24)")
class SizesExchanged(BookFeedForward):
    def __init__(self, cfg):
        super().__init__({**cfg, "emb_dim": cfg["hidden_dim"], "hidden_dim": cfg["emb_dim"]})


@refused(check_swiglu, "fc1.weight and fc2.weight are one and the same parameter")
class OneMatrixForBoth(BookFeedForward):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.fc2.weight = self.fc1.weight


@refused(check_swiglu, 'Does every nn.Linear get dtype=cfg["dtype"]')
class DtypeForgotten(BookFeedForward):
    def __init__(self, cfg):
        super().__init__({**cfg, "dtype": None})


@refused(check_swiglu, "bfloat16 went in and float32 came out")
class SwiGLUNotCastBack(Matrices):
    def forward(self, x):
        x = x.float()
        hidden = F.silu(x @ self.fc1.weight.float().T) * (x @ self.fc2.weight.float().T)
        return hidden @ self.fc3.weight.float().T


@refused(check_swiglu, "In float32 it is right, so something is rounded too much")
class CoarseInBfloat16(BookFeedForward):
    def forward(self, x):
        return super().forward(x if x.dtype == torch.float32 else (4 * x).round() / 4)


@refused(
    check_swiglu, "stopped with KeyError: 'drop_rate'. The config has emb_dim, hidden_dim, dtype"
)
class KeyOfGPT2(BookFeedForward):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.drop = nn.Dropout(cfg["drop_rate"])
