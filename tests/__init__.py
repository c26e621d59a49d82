"""The assertions of the kit show their values, as those of the test modules do."""

import pytest

pytest.register_assert_rewrite("tests.kit")
