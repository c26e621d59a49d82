"""Every private name of torch that this library uses, each with why it is needed and since when it exists.

No other package uses a name with an underscore of torch's. `tests/test_torch.py` looks for each one and
says which feature fails without it. Code that differs by torch version lives here too.
"""

from composer_dist._torch.communication import *
from composer_dist._torch.modules import *
from composer_dist._torch.operations import *
from composer_dist._torch.replication import *
from composer_dist._torch.sharding import *
from composer_dist._torch.tensors import *
