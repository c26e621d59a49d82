"""Every private name of torch that this library uses, with its reason and the torch version that added it.

No other package uses torch's private names. `tests/test_torch.py` checks for each one and says which feature
needs it. Code that depends on the torch version is here too.
"""

from composer_dist._torch.backward import *
from composer_dist._torch.communication import *
from composer_dist._torch.data import *
from composer_dist._torch.data_writes import *
from composer_dist._torch.dtensors import *
from composer_dist._torch.fake import *
from composer_dist._torch.gathered import *
from composer_dist._torch.modules import *
from composer_dist._torch.operations import *
from composer_dist._torch.optimizers import *
from composer_dist._torch.reductions import *
from composer_dist._torch.replication import *
from composer_dist._torch.sharding import *
from composer_dist._torch.tensors import *
from composer_dist._torch.unit_hooks import *
from composer_dist._torch.whole_gradients import *
