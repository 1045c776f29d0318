"""python -m spark_elastic.cli."""

import sys

from spark_elastic.cli import main

if __name__ == "__main__":
    sys.exit(main())
