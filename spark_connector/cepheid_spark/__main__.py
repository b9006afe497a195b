"""python -m cepheid_spark                  which Java Spark would take here, or which package to install
python -m cepheid_spark --install-java   installs it where it may: as root, with apt
"""

import sys

from cepheid_spark.java_check import main

sys.exit(main(sys.argv[1:]))
