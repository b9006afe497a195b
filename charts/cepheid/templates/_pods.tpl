{{/* What all pods share. Arguments: root, component, values (those of the component; of hooks and tests: jobs). */}}
{{- define "cepheid.pod" -}}
{{- $root := .root -}}
automountServiceAccountToken: {{ default false .token }}
# A service called NAME-broker would set CEPHEID_BROKER_PORT, which is a setting of ours.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with concat $root.Values.image.pullSecrets (dig "imagePullSecrets" list (default dict $root.Values.global)) }}
imagePullSecrets:
{{- range . }}
  - name: {{ kindIs "map" . | ternary (get (kindIs "map" . | ternary . dict) "name") . }}
{{- end }}
{{- end }}
{{- if has .component (list "zookeeper" "bookie" "broker" "standalone") }}
{{- with include "cepheid.serviceAccount" $root }}
serviceAccountName: {{ . }}
{{- end }}
{{- end }}
{{- /* Hooks and tests have nothing to hand over. */}}
terminationGracePeriodSeconds: {{ int (default 5 .values.terminationGracePeriodSeconds) }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- $selector := include "cepheid.selector" . | fromYaml -}}
{{- $constraints := list -}}
{{- $spread := default dict .values.spread -}}
{{- range $key, $topology := dict "hosts" "kubernetes.io/hostname" "zones" "topology.kubernetes.io/zone" -}}
{{- $how := get $spread $key -}}
{{- if has $how (list "require" "prefer") -}}
{{- $unsatisfiable := ternary "DoNotSchedule" "ScheduleAnyway" (eq $how "require") -}}
{{- $constraints = append $constraints (dict "maxSkew" 1 "topologyKey" $topology "whenUnsatisfiable" $unsatisfiable "labelSelector" (dict "matchLabels" $selector)) -}}
{{- end -}}
{{- end -}}
{{- with $constraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What all containers share. Arguments: root, resources, image (may be empty: that of all components). */}}
{{- define "cepheid.container" -}}
image: {{ default (include "cepheid.image" .root) .image }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
# The reason of a failed start is then shown by `kubectl describe pod`.
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources: {{- toYaml .resources | nindent 2 }}
{{- end -}}

{{/* Names of the pod for its settings. */}}
{{- define "cepheid.podEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{/* How commands in pods reach the brokers. Arguments: root. The volume `client` has CA and token where the cluster is secured. */}}
{{- define "cepheid.clientEnv" -}}
- name: CEPHEID_URL
  value: {{ include "cepheid.serviceUrl" .root }}
- name: CEPHEID_ADMIN_URL
  value: {{ include "cepheid.adminUrl" .root }}
{{- if .root.Values.secure }}
- name: CEPHEID_TLS_CA_FILE
  value: /etc/cepheid/client/ca.pem
- name: CEPHEID_TLS_CERTIFICATE_FILE
  value: /etc/cepheid/client/admin.pem
- name: CEPHEID_TLS_KEY_FILE
  value: /etc/cepheid/client/admin-key.pem
- name: CEPHEID_TOKEN_FILE
  value: /etc/cepheid/client/admin.token
- name: CEPHEID_METADATA_AUTH_FILE
  value: /etc/cepheid/client/metadata.auth
{{- end }}
{{- end -}}

{{/* How commands that an operator runs in a broker's pod reach the brokers. Brokers may have the administrator's credentials: whoever has
the key of tokens can make them. Arguments: root. */}}
{{- define "cepheid.operatorEnv" -}}
- name: CEPHEID_URL
  value: {{ include "cepheid.serviceUrl" .root }}
- name: CEPHEID_ADMIN_URL
  value: {{ include "cepheid.adminUrl" .root }}
{{- if .root.Values.secure }}
- name: CEPHEID_TLS_CA_FILE
  value: /etc/cepheid/secure/ca.pem
- name: CEPHEID_TLS_CERTIFICATE_FILE
  value: /etc/cepheid/secure/admin.pem
- name: CEPHEID_TLS_KEY_FILE
  value: /etc/cepheid/secure/admin-key.pem
- name: CEPHEID_TOKEN_FILE
  value: /etc/cepheid/secure/admin.token
- name: CEPHEID_METADATA_AUTH_FILE
  value: /etc/cepheid/secure/metadata.auth
{{- end }}
{{- end -}}

{{/* The init container that founds the cluster. It waits for ZooKeeper; when the cluster is there it does nothing. The first bookie founds
it, and only if the data on its volume, if any, is not of another one: a ZooKeeper that lost its volumes looks like a new one. All others
wait. Arguments: root, component. */}}
{{- define "cepheid.foundCluster" -}}
{{- $bookie := eq .component "bookie" -}}
- name: found-cluster
  {{- include "cepheid.container" (dict "root" .root "resources" .root.Values.jobs.resources) | nindent 2 }}
  {{- if $bookie }}
  command: [bash, -c, 'case "$POD_NAME" in *-0) ;; *) set -- "$@" --join ;; esac; exec cepheid init "$@"', found-cluster]
  {{- else }}
  command: [cepheid, init, --join]
  {{- end }}
  args:
    - --metadata={{ include "cepheid.metadataUrl" .root }}
    - --cluster={{ include "cepheid.clusterName" .root }}
    - --service-url={{ include "cepheid.serviceUrl" .root }}
    - --admin-url={{ include "cepheid.adminUrl" .root }}
    - --wait=3600
    {{- if $bookie }}
    - --data-dir=/data/bookie
    {{- end }}
    {{- if .root.Values.secure }}
    - --secure=/etc/cepheid/secure
    {{- end }}
  {{- if or $bookie .root.Values.zookeeper.tls.existingSecret }}
  env:
    {{- if $bookie }}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    {{- end }}
    {{- with include "cepheid.zookeeperEnv" .root | trim }}{{ . | nindent 4 }}{{ end }}
  {{- end }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- if $bookie }}
    - {name: data, mountPath: /data, readOnly: true}
    {{- end }}
    {{- if .root.Values.secure }}
    - {name: secure, mountPath: /etc/cepheid/secure, readOnly: true}
    {{- end }}
    {{- with include "cepheid.zookeeperMount" .root | trim }}{{ . | nindent 4 }}{{ end }}
{{- end -}}

{{/* What a process needs for an external ZooKeeper with TLS: variables, mount and volume. The context is the root. */}}
{{- define "cepheid.zookeeperEnv" -}}
{{- if .Values.zookeeper.tls.existingSecret }}
- {name: CEPHEID_METADATA_TLS_CA_FILE, value: /etc/cepheid/zookeeper/ca.crt}
{{- if .Values.zookeeper.tls.clientCertificate }}
- {name: CEPHEID_METADATA_TLS_CERTIFICATE_FILE, value: /etc/cepheid/zookeeper/tls.crt}
- {name: CEPHEID_METADATA_TLS_KEY_FILE, value: /etc/cepheid/zookeeper/tls.key}
{{- end }}
{{- end }}
{{- end -}}

{{- define "cepheid.zookeeperMount" -}}
{{- if .Values.zookeeper.tls.existingSecret }}
- {name: zookeeper-tls, mountPath: /etc/cepheid/zookeeper, readOnly: true}
{{- end }}
{{- end -}}

{{- define "cepheid.zookeeperVolume" -}}
{{- with .Values.zookeeper.tls }}
{{- if .existingSecret }}
- name: zookeeper-tls
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.crt}
      {{- if .clientCertificate }}
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The init container that adds to a TOML file what depends on the pod: its rack and its outer address. Arguments: root, role. */}}
{{- define "cepheid.configurePod" -}}
- name: configure
  {{- include "cepheid.container" (dict "root" .root "resources" .root.Values.jobs.resources) | nindent 2 }}
  command: [python3, /etc/cepheid/scripts/configure_pod.py]
  args: [/etc/cepheid/config/{{ .role }}.toml, /run/cepheid/{{ .role }}.toml]
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    {{- if .root.Values.rackAwareness.enabled }}
    - name: NODE_NAME
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
    {{- end }}
    {{- if and .root.Values.external.type (eq .role "broker") }}
    - name: NODE_IP
      valueFrom: {fieldRef: {fieldPath: status.hostIP}}
    - name: EXTERNAL_HOSTS
      value: {{ join "," .root.Values.external.hosts | quote }}
    {{- if eq .root.Values.external.type "NodePort" }}
    - name: FIRST_NODE_PORT
      value: {{ int .root.Values.external.firstNodePort | quote }}
    {{- end }}
    - name: SECURE
      value: {{ .root.Values.secure | quote }}
    {{- end }}
  volumeMounts:
    - {name: config, mountPath: /etc/cepheid/config, readOnly: true}
    - {name: scripts, mountPath: /etc/cepheid/scripts, readOnly: true}
    - {name: run, mountPath: /run/cepheid}
{{- end -}}

{{/* A script that runs before SIGTERM, while the process still serves. An upgrade stops ZooKeeper, a bookie and a broker at the same
moment, but topics are handed over and ledgers are opened through ZooKeeper: this waits until it has answered for some seconds in a row.
Arguments: root, seconds. */}}
{{- define "cepheid.beforeStop" -}}
{{- if .root.Values.zookeeper.externalUrl -}}
sleep {{ .seconds }}
{{- else -}}
# Waits until ZooKeeper has answered for {{ .seconds }} seconds in a row, at most 45 seconds. After `helm uninstall` its name is gone.
zookeeper={{ include "cepheid.fullname" .root }}-zookeeper-client
answers() {
  timeout 2 bash -c "exec 3<>/dev/tcp/$zookeeper/2181 && printf srvr >&3 && grep -q Mode: <&3" 2>/dev/null
}
in_a_row=0
end=$((SECONDS + 45))
while [ $in_a_row -lt {{ .seconds }} ] && [ $SECONDS -lt $end ] && getent hosts $zookeeper >/dev/null; do
  sleep 1
  if answers; then in_a_row=$((in_a_row + 1)); else in_a_row=0; fi
done
{{- end -}}
{{- end -}}

{{/* Annotations of pods by which Prometheus finds their metrics. Arguments: root, values, port, scheme. */}}
{{- define "cepheid.podAnnotations" -}}
{{- if .root.Values.monitoring.annotations }}
prometheus.io/scrape: "true"
prometheus.io/path: /metrics
prometheus.io/port: {{ .port | quote }}
prometheus.io/scheme: {{ .scheme }}
{{- end }}
{{- with .values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A claim of a StatefulSet. Arguments: name, storage. */}}
{{- define "cepheid.claim" -}}
- metadata:
    name: {{ .name }}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storage.storageClass }}
    storageClassName: {{ if eq . "-" }}""{{ else }}{{ . }}{{ end }}
    {{- end }}
    resources: {requests: {storage: {{ .storage.size }}}}
{{- end -}}

{{/* The volume with credentials, without its name. Arguments: root, secret (server, bookie or client). With cert-manager the certificates
come from its secrets, under the names of files that the chart's own secret has. */}}
{{- define "cepheid.credentials" -}}
{{- $root := .root -}}
{{- $name := include (printf "cepheid.%sSecret" .secret) $root -}}
{{- if not $root.Values.tls.certManager.issuerRef.name -}}
secret: {secretName: {{ $name }}, defaultMode: 0440}
{{- else -}}
{{- $one := eq $root.Values.profile "one" -}}
{{- $own := get (dict "server" (list "token.key" "broker.token" "admin.token" "metadata.auth") "bookie" (list "metadata.auth") "client" (list "admin.token" "metadata.auth")) .secret -}}
{{- $certificates := get (dict "server" (list (ternary "server" "broker" $one) "admin") "bookie" (list "bookie") "client" (list "admin")) .secret -}}
projected:
  defaultMode: 0440
  sources:
    - secret:
        name: {{ $name }}
        items:
          {{- range $own }}
          - {key: {{ . }}, path: {{ . }}}
          {{- end }}
    {{- range $index, $certificate := $certificates }}
    - secret:
        name: {{ include "cepheid.fullname" $root }}-{{ $certificate }}-tls
        items:
          - {key: tls.crt, path: {{ $certificate }}.pem}
          - {key: tls.key, path: {{ $certificate }}-key.pem}
          {{- if eq $index 0 }}
          - {key: ca.crt, path: ca.pem}
          {{- end }}
    {{- end }}
{{- end -}}
{{- end -}}
