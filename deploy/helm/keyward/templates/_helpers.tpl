{{/* The name of every object: that of the release, which says "keyward" already or gets it. */}}
{{- define "keyward.name" -}}
{{- if contains "keyward" .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-keyward" .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "keyward.selector" -}}
app.kubernetes.io/name: keyward
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "keyward.labels" -}}
{{ include "keyward.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}
