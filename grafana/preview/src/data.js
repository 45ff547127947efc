// From a board's JSON to frames: variables filled in, queries asked, fields configured, transformations applied.
import {
  FieldType, getDisplayProcessor, getFieldDisplayName, standardTransformers, standardTransformersRegistry,
  toDataFrame, transformDataFrame, createTheme,
} from '@grafana/data';
import { lastValueFrom } from 'rxjs';

const byId = new Map(Object.values(standardTransformers).map((t) => [t.id, t])); // one of them is there under two names
standardTransformersRegistry.setInit(() =>
  [...byId.values()].map((t) => ({ id: t.id, name: t.name, transformation: () => Promise.resolve(t), editor: () => null, excludeOptions: undefined }))
);
const theme = createTheme({ colors: { mode: 'dark' } });
const SCRAPE = 30;

export async function load(asked) {
  const json = await (await fetch(`/dashboards/${asked.board}.json`)).json();
  const time = { from: Number(asked.from), to: Number(asked.to) };
  const chosen = Object.fromEntries(
    Object.entries(asked).filter(([key]) => key.startsWith('var-')).map(([key, value]) => [key.slice(4), value])
  );
  const scope = { prometheus: asked.prometheus, time, step: Math.max(SCRAPE, Math.ceil((time.to - time.from) / 240)), chosen, texts: {} };
  const alerts = await range(scope, json.annotations.list[0].expr);
  const panels = [];
  for (const panel of json.panels) {
    for (const one of await repeated(scope, json, panel)) {
      panels.push({ ...one, data: one.type === 'row' || one.type === 'text' ? [] : await ask(one.scope, one) });
    }
  }
  return { title: json.title, links: json.links, chosen, time, panels: placed(panels), alerts };
}

// What Grafana does with a panel that has a variable to repeat for.
async function repeated(scope, json, panel) {
  if (!panel.repeat) return [{ ...panel, scope }];
  const variable = json.templating.list.find((v) => v.name === panel.repeat);
  const [, inner] = variable.query.query.match(/^query_result\((.*)\)$/s);
  const found = await call(scope, 'query', { query: fill(scope, inner), time: scope.time.to });
  const options = found.map((s) => ({ text: s.metric.text, value: s.metric.uuid })).sort((a, b) => a.text.localeCompare(b.text));
  const across = Math.min(panel.maxPerRow ?? 4, options.length) || 1;
  return options.slice(0, 8).map((option, n) => ({
    ...panel,
    title: panel.title.replace('${gpu:text}', option.text),
    scope: { ...scope, chosen: { ...scope.chosen, [panel.repeat]: option.value } },
    gridPos: { ...panel.gridPos, w: 24 / across, x: (n % across) * (24 / across), y: panel.gridPos.y + Math.floor(n / across) * panel.gridPos.h },
  }));
}

function placed(panels) {
  return panels.sort((a, b) => a.gridPos.y - b.gridPos.y || a.gridPos.x - b.gridPos.x);
}

function fill(scope, text) {
  return text
    .replaceAll('$__rate_interval', `${4 * SCRAPE}s`)
    .replaceAll('$__range', `${Math.round(scope.time.to - scope.time.from)}s`)
    .replace(/\$([a-z]\w*)/g, (_, name) => scope.chosen[name] ?? '.*');
}

async function call(scope, path, parameters) {
  const answer = await fetch(`${scope.prometheus}/api/v1/${path}`, { method: 'POST', body: new URLSearchParams(parameters) });
  const body = await answer.json();
  if (body.status !== 'success') throw new Error(`${parameters.query}: ${body.error}`);
  return body.data.result;
}

async function range(scope, expr) {
  return call(scope, 'query_range', { query: fill(scope, expr), start: scope.time.from, end: scope.time.to, step: scope.step });
}

async function ask(scope, panel) {
  const several = panel.targets.length > 1;
  const frames = [];
  for (const target of panel.targets) {
    const series = target.instant
      ? await call(scope, 'query', { query: fill(scope, target.expr), time: scope.time.to })
      : await range(scope, target.expr);
    if (target.format === 'table') frames.push(tabular(series, target, several));
    else frames.push(...series.map((one) => frame(one, target)));
  }
  const steps = (panel.transformations ?? []).map((t) => ({ id: t.id, options: t.options }));
  const made = steps.length && frames.some((f) => f.length) ? await lastValueFrom(transformDataFrame(steps, frames.filter((f) => f.length))) : frames;
  return configured(made, panel);
}

function frame(one, target) {
  const points = one.values ?? [one.value];
  const legend = target.legendFormat === '__auto' ? Object.values(one.metric).join(' ') : target.legendFormat.replace(/\{\{(\w+)\}\}/g, (_, name) => one.metric[name] ?? '');
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: points.map(([at]) => at * 1000), config: {} },
      { name: 'Value', type: FieldType.number, values: points.map(([, value]) => Number(value)), labels: one.metric, config: { displayNameFromDS: legend } },
    ],
  });
}

function tabular(series, target, several) {
  const names = [...new Set(series.flatMap((s) => Object.keys(s.metric)))].sort();
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: series.map((s) => s.value[0] * 1000), config: {} },
      ...names.map((name) => ({ name, type: FieldType.string, values: series.map((s) => s.metric[name] ?? ''), config: {} })),
      { name: several ? `Value #${target.refId}` : 'Value', type: FieldType.number, values: series.map((s) => Number(s.value[1])), config: {} },
    ],
  });
}

// Defaults and overrides of the panel, as Grafana applies them.
function configured(frames, panel) {
  const { defaults, overrides } = panel.fieldConfig;
  let index = 0;
  for (const one of frames) {
    for (const field of one.fields) {
      if (field.type === FieldType.time) continue;
      const name = getFieldDisplayName(field, one, frames);
      const config = { ...structuredClone(defaults), ...field.config, custom: structuredClone(defaults.custom ?? {}) };
      for (const { matcher, properties } of overrides ?? []) {
        if (!matches(matcher, name)) continue;
        for (const { id, value } of properties) {
          if (id.startsWith('custom.')) config.custom[id.slice(7)] = value;
          else config[id] = value;
        }
      }
      config.color ??= { mode: panel.type === 'timeseries' || panel.type === 'barchart' ? 'palette-classic' : 'thresholds' };
      config.thresholds = lowest(config.thresholds);
      if (config.links) config.links = [];
      field.config = config;
      field.state = { ...field.state, displayName: name, seriesIndex: index++ };
      field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
    }
  }
  return frames;
}

function lowest(thresholds) {
  const given = thresholds ?? { mode: 'absolute', steps: [{ value: null, color: 'green' }] };
  return { ...given, steps: given.steps.map((step) => ({ ...step, value: step.value ?? -Infinity })) };
}

function matches({ id, options }, name) {
  if (id === 'byName') return options === name;
  if (id === 'byRegexp') return new RegExp(options.replace(/^\/|\/$/g, '')).test(name);
  throw new Error(`an override by ${id}`);
}
