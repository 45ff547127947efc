// The board's grid, its head, and each panel in Grafana's frame.
import React from 'react';
import { dateTime, getDisplayValueAlignmentFactors, renderMarkdown } from '@grafana/data';
import { BarGauge, BigValue, PanelChrome, Table, TimeSeries, VizRepeater } from '@grafana/ui';
import { Alerts, Bars, Heat, States } from './plots.jsx';

const WIDTH = 1400;
const CELL = 30;
const GAP = 8;

export function Board({ title, links, chosen, time, panels, alerts, theme }) {
  const column = (WIDTH - GAP) / 24;
  const bottom = Math.max(...panels.map((p) => p.gridPos.y + p.gridPos.h));
  const period = `${dateTime(time.from * 1000).utc().format('HH:mm')} to ${dateTime(time.to * 1000).utc().format('HH:mm')} UTC`;
  const selection = Object.entries(chosen).map(([name, value]) => `${name} = ${value}`).join(', ') || 'all replicas';
  return (
    <div style={{ width: WIDTH, background: theme.colors.background.canvas, color: theme.colors.text.primary, paddingBottom: GAP }}>
      <div style={{ display: 'flex', gap: 20, padding: '10px 12px', fontSize: 16, alignItems: 'baseline' }}>
        <b>{title}</b>
        <span style={{ color: theme.colors.text.secondary, fontSize: 13 }}>{selection} · {period}</span>
        <span style={{ flex: 1 }} />
        {links.map((link) => <span key={link.url} style={{ color: theme.colors.text.link, fontSize: 13 }}>{link.title}</span>)}
      </div>
      <div style={{ position: 'relative', height: bottom * (CELL + GAP) }}>
        {panels.map((panel, n) => {
          const { x, y, w, h } = panel.gridPos;
          const size = { width: w * column - GAP, height: h * (CELL + GAP) - GAP };
          return (
            <div key={n} style={{ position: 'absolute', left: GAP + x * column, top: y * (CELL + GAP), ...size }}>
              {panel.type === 'row' ? <h5 style={{ margin: '6px 2px' }}>⌄ {panel.title}</h5> : <One panel={panel} size={size} time={time} alerts={alerts} theme={theme} />}
            </div>
          );
        })}
      </div>
    </div>
  );
}

function One({ panel, size, time, alerts, theme }) {
  return (
    <PanelChrome title={panel.title} description={panel.description} {...size} padding={panel.type === 'table' ? 'none' : 'md'}>
      {(width, height) => <Content {...{ panel, width, height, time, alerts, theme }} />}
    </PanelChrome>
  );
}

function Content({ panel, width, height, time, alerts, theme }) {
  if (panel.type === 'text') {
    return <div className="markdown-html" style={{ width, height, overflow: 'hidden', fontSize: 13 }} dangerouslySetInnerHTML={{ __html: renderMarkdown(panel.options.content) }} />;
  }
  if (!panel.data.some((frame) => frame.length)) return <Nothing text={panel.fieldConfig.defaults.noValue} width={width} height={height} />;
  const common = { frames: panel.data, options: panel.options, width, height, time, theme };
  switch (panel.type) {
    case 'timeseries': return <Lines {...common} alerts={alerts} />;
    case 'stat': return <Stats {...common} />;
    case 'bargauge': return <Gauges {...common} />;
    case 'table': return <Rows {...common} />;
    case 'state-timeline': return <States {...common} />;
    case 'heatmap': return <Heat {...common} unit={panel.fieldConfig.defaults.unit} />;
    case 'barchart': return <Bars {...common} />;
    default: throw new Error(`no panel of type ${panel.type} here`);
  }
}

function Nothing({ text, width, height }) {
  return <div style={{ width, height, display: 'flex', alignItems: 'center', justifyContent: 'center', textAlign: 'center', padding: 12, color: '#b877d9' }}>{text}</div>;
}

function Lines({ frames, options, width, height, time, alerts }) {
  const at = (seconds) => dateTime(seconds * 1000);
  const timeRange = { from: at(time.from), to: at(time.to), raw: { from: at(time.from), to: at(time.to) } };
  const shown = frames.filter((f) => f.length);
  return (
    <TimeSeries frames={shown} timeRange={timeRange} timeZone="utc" width={width} height={height} legend={options.legend} options={options}>
      {(config) => <Alerts config={config} alerts={alerts} />}
    </TimeSeries>
  );
}

const last = (frames) =>
  frames.flatMap((frame) => frame.fields.filter((f) => f.type === 'number').map((field) => ({ field, value: field.values[field.values.length - 1] })));

function Stats({ frames, options, width, height, theme }) {
  const values = last(frames).map(({ field, value }) => ({ ...field.display(value), title: field.state.displayName }));
  return (
    <VizRepeater
      getValues={() => values} source={frames} renderCounter={0} width={width} height={height} autoGrid
      orientation={options.orientation} itemSpacing={3} getAlignmentFactors={(all) => getDisplayValueAlignmentFactors(all.map((display) => ({ display })))}
      renderValue={({ value, width: w, height: h, count, alignmentFactors }) => (
        <BigValue value={value} count={count} alignmentFactors={alignmentFactors} width={w} height={h} theme={theme} colorMode={options.colorMode} graphMode="none" justifyMode={options.justifyMode} textMode={options.textMode} disableWideLayout={options.wideLayout === false} />
      )}
    />
  );
}

function Gauges({ frames, options, width, height, theme }) {
  const values = last(frames);
  return (
    <VizRepeater
      getValues={() => values} source={frames} renderCounter={0} width={width} height={height} orientation={options.orientation}
      itemSpacing={10} minVizHeight={options.minVizHeight} maxVizHeight={options.maxVizHeight}
      getAlignmentFactors={(all) => getDisplayValueAlignmentFactors(all.map(({ field, value }) => ({ display: { ...field.display(value), title: field.state.displayName } })))}
      renderValue={({ value: { field, value }, width: w, height: h, alignmentFactors }) => (
        <BarGauge
          value={{ ...field.display(value), title: field.state.displayName }} field={field.config} display={field.display} theme={theme} width={w} height={h}
          orientation={options.orientation} displayMode={options.displayMode} valueDisplayMode={options.valueMode} namePlacement={options.namePlacement} showUnfilled={options.showUnfilled} alignmentFactors={alignmentFactors}
        />
      )}
    />
  );
}

function Rows({ frames, options, width, height }) {
  return <Table data={frames[0]} width={width} height={height} initialSortBy={options.sortBy} showTypeIcons={false} />;
}
