"""python -m cepheid_spark                  which Java and which Python Spark would take here, or what to do
python -m cepheid_spark --install-java   installs Java where it may: as root, with apt
"""

import sys

from cepheid_spark.java_check import find_fault, main

status = main(sys.argv[1:])
if "--install-java" not in sys.argv and (fault := find_fault()) is not None:
    sys.stderr.write(f"{fault}\n")
    status = 1
sys.exit(status)
