{{/* The values of the user over those of the profile, as YAML. An empty text or list counts as not given. */}}
{{- define "cepheid.values" -}}
{{- $profile := .Files.Get (printf "profiles/%s.yaml" .Values.profile) | fromYaml -}}
{{- mergeOverwrite $profile (include "cepheid.given" .Values | fromYaml) | toYaml -}}
{{- end -}}

{{- define "cepheid.given" -}}
{{- $given := dict -}}
{{- range $key, $value := . -}}
{{- if kindIs "map" $value -}}
{{- $_ := set $given $key (include "cepheid.given" $value | fromYaml) -}}
{{- else if not (or (kindIs "invalid" $value) (and (or (kindIs "string" $value) (kindIs "slice" $value)) (empty $value))) -}}
{{- $_ := set $given $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $given -}}
{{- end -}}

{{/* Begins the name of each object. The longest ending has 20 characters, and a name may have 63. */}}
{{- define "cepheid.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "cepheid.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "cepheid.labels" -}}
{{ include "cepheid.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "cepheid.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end -}}

{{/* DNS domain of a headless service: the names of its pods are below it. */}}
{{- define "cepheid.domain" -}}
{{ printf "%s-%s.%s.svc.%s" (include "cepheid.fullname" .root) .component .root.Release.Namespace .root.Values.clusterDomain }}
{{- end -}}

{{- define "cepheid.clusterName" -}}
{{ default (include "cepheid.fullname" .) .Values.clusterName }}
{{- end -}}

{{- define "cepheid.metadataUrl" -}}
{{- if .Values.zookeeper.externalUrl -}}
{{ .Values.zookeeper.externalUrl }}
{{- else -}}
zk://{{ include "cepheid.fullname" . }}-zookeeper-client.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:2181
{{- end -}}
{{- end -}}

{{/* The name under which clients in the Kubernetes cluster reach all brokers together. */}}
{{- define "cepheid.serviceHost" -}}
{{ printf "%s.%s.svc.%s" (include "cepheid.fullname" .) .Release.Namespace .Values.clusterDomain }}
{{- end -}}

{{- define "cepheid.serviceUrl" -}}
{{ printf (ternary "pulsar+ssl://%s:6651" "pulsar://%s:6650" .Values.secure) (include "cepheid.serviceHost" .) }}
{{- end -}}

{{- define "cepheid.adminUrl" -}}
{{ printf (ternary "https://%s:8443" "http://%s:8080" .Values.secure) (include "cepheid.serviceHost" .) }}
{{- end -}}

{{/* The service account of the pods of components, empty for the namespace's default one. */}}
{{- define "cepheid.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create -}}
{{ include "cepheid.fullname" . }}
{{- else if and .Values.rackAwareness.enabled (ne .Values.profile "one") -}}
{{ include "cepheid.fullname" . }}-node-reader
{{- end -}}
{{- end -}}

{{- define "cepheid.serverSecret" -}}
{{ default (printf "%s-server" (include "cepheid.fullname" .)) .Values.security.existingSecrets.server }}
{{- end -}}

{{- define "cepheid.bookieSecret" -}}
{{ default (printf "%s-bookie" (include "cepheid.fullname" .)) .Values.security.existingSecrets.bookie }}
{{- end -}}

{{- define "cepheid.clientSecret" -}}
{{ default (printf "%s-client" (include "cepheid.fullname" .)) .Values.security.existingSecrets.client }}
{{- end -}}

{{/* Secret and key with the CA that signed the certificates of servers. */}}
{{- define "cepheid.caReference" -}}
{{- if .Values.tls.certManager.issuerRef.name -}}
{name: {{ include "cepheid.fullname" . }}-admin-tls, key: ca.crt}
{{- else -}}
{name: {{ include "cepheid.clientSecret" . }}, key: ca.pem}
{{- end -}}
{{- end -}}

{{/* Settings as TOML. Arguments: table, path (the dotted name of the table with a dot after it). */}}
{{- define "cepheid.toml" -}}
{{- $path := .path -}}
{{- range $key, $value := .table }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ $key }} = {{ include "cepheid.tomlValue" $value }}
{{- end }}
{{- end }}
{{- range $key, $value := .table }}
{{- if kindIs "map" $value }}

[{{ $path }}{{ $key }}]
{{- include "cepheid.toml" (dict "table" $value "path" (printf "%s%s." $path $key)) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Numbers of values.yaml arrive as floating point; a text in JSON is also one in TOML. */}}
{{- define "cepheid.tomlValue" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- end -}}

{{/* Settings of brokers and of the standalone server when they are secured, as `cepheid secure init` writes them. */}}
{{- define "cepheid.secureSettings" -}}
{{- $certificate := ternary "server" "broker" (eq .Values.profile "one") -}}
{{- if ne .Values.profile "one" }}
metadata_auth_file: /etc/cepheid/secure/metadata.auth
{{- end }}
tls:
  certificate_file: /etc/cepheid/secure/{{ $certificate }}.pem
  key_file: /etc/cepheid/secure/{{ $certificate }}-key.pem
  ca_file: /etc/cepheid/secure/ca.pem
  client_ca_file: /etc/cepheid/secure/ca.pem
  client_certificates: optional
authentication:
  methods: [token, tls]
  secret_keys: [/etc/cepheid/secure/token.key]
  own_token_file: /etc/cepheid/secure/broker.token
{{- if .Values.security.authorization }}
authorization:
  enabled: true
  super_user_roles: [admin]
  peer_roles: [broker]
{{- end }}
{{- end -}}

{{/* Names under which the admin API may be called; the API refuses others, so that no foreign web page reaches it. */}}
{{- define "cepheid.allowedHosts" -}}
{{- $name := include "cepheid.fullname" . -}}
{{- $namespace := .Release.Namespace -}}
{{- $domain := .Values.clusterDomain -}}
hosts:
  - {{ $name }}
  - {{ $name }}.{{ $namespace }}
  - {{ $name }}.{{ $namespace }}.svc
  - {{ $name }}.{{ $namespace }}.svc.{{ $domain }}
  - .{{ $name }}-{{ ternary "standalone" "broker" (eq .Values.profile "one") }}.{{ $namespace }}.svc.{{ $domain }}
{{- range concat .Values.external.hosts .Values.security.hosts }}
  - {{ . }}
{{- end }}
{{- end -}}

{{/* A line about each value that is in values.yaml and was not given: Helm fills them in, but not for --reuse-values, and not where null
was given. Arguments: given, always (of files/known-values.json), path. */}}
{{- define "cepheid.missingValues" -}}
{{- $given := .given -}}
{{- $path := .path -}}
{{- range $key, $inner := .always }}
{{- if not (hasKey $given $key) }}
{{ $path }}{{ $key }} is missing
{{- else if and (kindIs "map" $inner) (kindIs "map" (get $given $key)) }}
{{- include "cepheid.missingValues" (dict "given" (get $given $key) "always" $inner "path" (printf "%s%s." $path $key)) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A line about each value that the chart does not have. Arguments: given, names (of files/known-values.json), path. */}}
{{- define "cepheid.unknownValues" -}}
{{- $names := .names -}}
{{- $path := .path -}}
{{- $settable := list -}}
{{- range $name := keys $names | sortAlpha -}}
{{- $known := get $names $name -}}
{{- if or (kindIs "map" $known) $known }}{{ $settable = append $settable $name }}{{ end -}}
{{- end -}}
{{- range $key, $value := .given }}
{{- $known := get $names $key }}
{{- if not (hasKey $names $key) }}
{{ $path }}{{ $key }} is not a value of this chart: {{ if eq (printf "%s%s" $path $key) "imagePullSecrets" }}did you mean image.pullSecrets?{{ else }}{{ include "cepheid.meant" (dict "given" $key "names" $settable) }}{{ end }}
{{- else if and (kindIs "bool" $known) (not $known) }}
{{ $path }}{{ $key }} is decided by the chart, and cannot be set
{{- else if and (kindIs "map" $known) (kindIs "map" $value) }}
{{- include "cepheid.unknownValues" (dict "given" $value "names" $known "path" (printf "%s%s." $path $key)) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The name that was meant if one is near, otherwise all names. Arguments: given, names. */}}
{{- define "cepheid.meant" -}}
{{- $given := .given -}}
{{- $limit := div (add (len $given) 2) 3 -}}
{{- $nearest := "" -}}
{{- range $name := .names -}}
{{- if le (max (sub (len $name) (len $given)) (sub (len $given) (len $name))) $limit -}}
{{- $distance := include "cepheid.distance" (dict "a" (lower $given) "b" (lower $name)) | int -}}
{{- if le $distance (int $limit) -}}
{{- $limit = sub $distance 1 -}}
{{- $nearest = $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $nearest }}did you mean {{ $nearest }}?{{ else }}there are {{ join ", " .names }}{{ end -}}
{{- end -}}

{{/* How many characters of a text must be added, removed or replaced to make another one. Arguments: a, b. */}}
{{- define "cepheid.distance" -}}
{{- $b := splitList "" .b -}}
{{- $row := untilStep 0 (int (add1 (len $b))) 1 -}}
{{- range $i, $x := splitList "" .a -}}
{{- $next := list (add1 $i) -}}
{{- range $j, $y := $b -}}
{{- $replaced := add (index $row $j) (ternary 0 1 (eq $x $y)) -}}
{{- $next = append $next (min $replaced (add1 (index $row (add1 $j))) (add1 (last $next))) -}}
{{- end -}}
{{- $row = $next -}}
{{- end -}}
{{- last $row -}}
{{- end -}}
