{{/*
For your own chart: name this one under `dependencies` and put into the pod template of your server

  metadata:
    labels:
      {{- include "stopline.podLabels" . | nindent 6 }}
  spec:
    initContainers:
      {{- include "stopline.sidecar" . | nindent 6 }}
    containers:
      - name: server
        command: [/bin/sh, /etc/stopline/with-log, /var/log/engine/server.log, YOUR, COMMAND]
        volumeMounts:
          {{- include "stopline.serverMounts" . | nindent 10 }}
    volumes:
      {{- include "stopline.volumes" . | nindent 6 }}

with `stopline:` in your values for what stands in this chart's.  With native: false the sidecar goes under containers.
Rules and boards are wanted once for each Prometheus and Grafana, and each pod by one monitor: in all other charts set
`stopline.rules.enabled`, `stopline.boards.enabled` and `stopline.podMonitor.enabled` to false.
*/}}

{{- define "stopline.values" -}}
{{- .Values.stopline | default .Values | toJson -}}
{{- end }}

{{- define "stopline.name" -}}
{{- printf "%s-stopline" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "stopline.podLabels" -}}
stopline: sidecar
{{- end }}

{{- define "stopline.sidecar" -}}
{{- $values := include "stopline.values" . | fromJson -}}
{{- $sidecar := $values.sidecar -}}
- name: stopline
  image: {{ $sidecar.image | quote }}
  {{- if $sidecar.native }}
  {{- if semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version }}
  {{- fail "sidecar.native takes Kubernetes 1.29: set it to false, and include stopline.sidecar under containers" }}
  {{- end }}
  restartPolicy: Always
  {{- end }}
  args: [run, --config, /etc/stopline/stopline.yml]
  env:
    - name: STOPLINE_LOG
      value: {{ $sidecar.log | quote }}
    {{- if $values.tls.enabled }}
    - name: STOPLINE_WEB_CONFIG_FILE
      value: /etc/stopline-web/web.yml
    {{- end }}
    {{- with $sidecar.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: stopline
      containerPort: 10777
  livenessProbe:
    httpGet:
      path: /-/healthy
      port: stopline
      {{- if $values.tls.enabled }}
      scheme: HTTPS
      {{- end }}
    periodSeconds: 30
    timeoutSeconds: 5
    failureThreshold: 4
  resources:
    {{- toYaml $sidecar.resources | nindent 4 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
    seccompProfile:
      type: RuntimeDefault
  volumeMounts:
    - name: stopline-settings
      mountPath: /etc/stopline
      readOnly: true
    - name: stopline-state
      mountPath: /var/lib/stopline
    - name: stopline-log
      mountPath: /var/log/engine
      readOnly: true
    {{- if $values.tls.enabled }}
    - name: stopline-web
      mountPath: /etc/stopline-web
      readOnly: true
    {{- end }}
{{- end }}

{{- define "stopline.serverMounts" -}}
- name: stopline-settings
  mountPath: /etc/stopline
  readOnly: true
- name: stopline-log
  mountPath: /var/log/engine
{{- end }}

{{- define "stopline.volumes" -}}
- name: stopline-settings
  configMap:
    name: {{ include "stopline.name" . }}
- name: stopline-state
  emptyDir:
    sizeLimit: 16Mi
- name: stopline-log
  emptyDir:
    sizeLimit: 1Gi
{{- if (include "stopline.values" . | fromJson).tls.enabled }}
- name: stopline-web
  secret:
    secretName: stopline-web
{{- end }}
{{- end }}

{{- /* What Prometheus needs of a page with TLS and a password. */ -}}
{{- define "stopline.endpoint" -}}
{{- if .Values.tls.enabled }}
scheme: https
tlsConfig:
  ca:
    secret:
      name: stopline-scrape
      key: ca.crt
  serverName: {{ .Values.tls.serverName }}
basicAuth:
  username:
    name: stopline-scrape
    key: username
  password:
    name: stopline-scrape
    key: password
{{- end }}
{{- end }}

{{- define "stopline.labels" -}}
app.kubernetes.io/name: stopline
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}
