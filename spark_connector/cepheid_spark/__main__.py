"""python -m cepheid_spark: shows which Java and Python Spark would use here, or what to do."""

import sys

from cepheid_spark.java_check import NoJavaError, find_fault, find_java

fault: NoJavaError | str | None
try:
    java = find_java()
    sys.stdout.write(f"Java {java.version}: {java.path}\n")
    fault = find_fault()
except NoJavaError as error:
    fault = error
if fault is not None:
    sys.exit(str(fault))
