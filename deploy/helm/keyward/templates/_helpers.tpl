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

{{/* What every pod of the chart has: no rights, and the volumes. */}}
{{- define "keyward.pod" -}}
# Keyward never asks Kubernetes.
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
volumes:
  - name: config
    configMap:
      name: {{ include "keyward.name" . }}
  - name: run
    emptyDir:
      medium: Memory
      sizeLimit: 1Mi
  - name: state
    emptyDir:
      sizeLimit: 16Mi
  {{- range .Values.secrets }}
  - name: secret-{{ .name }}
    secret:
      secretName: {{ .secretName }}
      defaultMode: 0440
  {{- end }}
{{- with .Values.extraVolumes }}
{{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Image, environment, rights and mounts of a container that runs Keyward. */}}
{{- define "keyward.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - name: KEYWARD_CONFIG
    value: /etc/keyward/config/keyward.toml
  - name: KEYWARD_RUNTIME__STATE_DIR
    value: /var/lib/keyward
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: ["ALL"]
volumeMounts:
  - name: config
    mountPath: /etc/keyward/config
    readOnly: true
  # The admin socket: kubectl exec POD -- keyward status
  - name: run
    mountPath: /run/keyward
  # runtime.state_dir: outlives a container, not its pod.
  - name: state
    mountPath: /var/lib/keyward
  {{- range .Values.secrets }}
  - name: secret-{{ .name }}
    mountPath: /etc/keyward/{{ .name }}
    readOnly: true
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
