// What Grafana keeps inside its application and does not publish: alerts on a time series, heat maps, state timelines
// and bar charts, drawn plainly.
import React, { useLayoutEffect } from 'react';
import { dateTime } from '@grafana/data';

export function Alerts({ config, alerts }) {
  useLayoutEffect(() => {
    config.addHook('draw', (u) => {
      const { ctx, bbox } = u;
      ctx.save();
      ctx.fillStyle = ctx.strokeStyle = '#ff9830';
      ctx.setLineDash([3, 3]);
      for (const began of new Set(alerts.map((a) => a.values[0][0]))) {
        const x = u.valToPos(began * 1000, 'x', true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.fillRect(x - 3, bbox.top + bbox.height, 6, 6);
      }
      ctx.restore();
    });
  }, [config, alerts]);
  return null;
}

const LEFT = 60;
const BOTTOM = 22;

function Times({ time, width, height }) {
  return [0, 0.25, 0.5, 0.75].map((part) => (
    <text key={part} x={LEFT + part * (width - LEFT)} y={height - 6} fontSize="11" fill="#ccccdc">
      {dateTime((time.from + part * (time.to - time.from)) * 1000).utc().format('HH:mm')}
    </text>
  ));
}

export function States({ frames, width, height, time }) {
  const series = frames.flatMap((f) => f.fields.filter((x) => x.type === 'number').map((field) => ({ times: f.fields[0].values, field })));
  const left = 190;
  const row = (height - BOTTOM) / series.length;
  const x = (at) => left + ((at / 1000 - time.from) / (time.to - time.from)) * (width - left);
  const step = series[0].times.length > 1 ? series[0].times[1] - series[0].times[0] : 30000;
  return (
    <svg width={width} height={height}>
      {series.map(({ times, field }, n) => (
        <g key={n}>
          <text x={left - 8} y={(n + 0.7) * row} fontSize={Math.min(12, row)} textAnchor="end" fill="#ccccdc">{field.state.displayName}</text>
          {times.map((at, i) => (
            <rect key={i} x={x(at)} width={Math.max(0.5, x(at + step) - x(at) + 0.3)} y={n * row + row * 0.1} height={row * 0.8} fill={field.display(field.values[i]).color} />
          ))}
        </g>
      ))}
      <g transform={`translate(${left - LEFT} 0)`}><Times time={time} width={width - left + LEFT} height={height} /></g>
    </svg>
  );
}

export function Heat({ frames, width, height, time, theme }) {
  const bound = (f) => Number(f.fields[1].labels.le.replace('+Inf', 'Infinity'));
  const sorted = [...frames].sort((a, b) => bound(a) - bound(b));
  const steps = [...new Set(sorted.flatMap((f) => f.fields[0].values))].sort((a, b) => a - b);
  const cumulative = sorted.map((f) => new Map(f.fields[0].values.map((at, i) => [at, f.fields[1].values[i]])));
  const counts = cumulative.map((one, n) => steps.map((at) => (one.get(at) ?? 0) - (n ? cumulative[n - 1].get(at) ?? 0 : 0)));
  const most = Math.max(...counts.flat(), 1e-9);
  const row = (height - BOTTOM) / sorted.length;
  const x = (at) => LEFT + ((at / 1000 - time.from) / (time.to - time.from)) * (width - LEFT);
  const step = steps.length > 1 ? steps[1] - steps[0] : 30000;
  const colour = (share) => `rgb(${40 + 215 * share}, ${20 + 150 * share}, ${10 + 60 * share})`;
  const label = (value) => !Number.isFinite(value) ? '∞' : (value < 1 ? `${Number((value * 1000).toPrecision(2))} ms` : `${Number(value.toPrecision(2))} s`);
  return (
    <svg width={width} height={height} style={{ background: theme.colors.background.primary }}>
      {counts.map((line, n) =>
        line.map((count, i) =>
          count > 0 ? <rect key={`${n} ${i}`} x={x(steps[i]) - 0.2} width={Math.max(1, x(steps[i] + step) - x(steps[i]) + 0.4)} y={height - BOTTOM - (n + 1) * row} height={row + 0.4} fill={colour(Math.sqrt(count / most))} /> : null
        )
      )}
      {sorted.map((f, n) =>
        n % Math.ceil(sorted.length / 7) === 0 ? <text key={n} x={LEFT - 6} y={height - BOTTOM - n * row} fontSize="11" textAnchor="end" fill="#ccccdc">{label(bound(f))}</text> : null
      )}
      <Times time={time} width={width} height={height} />
    </svg>
  );
}

const TONES = ['#73bf69', '#f2cc0c', '#5794f2', '#ff9830', '#b877d9', '#8ab8ff', '#c4162a', '#808080'];

export function Bars({ frames, options, width, height }) {
  const [frame] = frames;
  const names = frame.fields.find((f) => f.name === options.xField);
  const bars = frame.fields.filter((f) => f !== names && f.type === 'number');
  const most = Math.max(...bars.flatMap((f) => f.values.filter((v) => Number.isFinite(v))));
  const legend = 20;
  const floor = height - BOTTOM - legend;
  const group = (width - LEFT) / names.values.length;
  const bar = (group * 0.75) / bars.length;
  const text = (field, value) => {
    const { text: shown, suffix } = field.display(value);
    return `${shown}${suffix ?? ''}`;
  };
  return (
    <svg width={width} height={height}>
      {[0, 0.25, 0.5, 0.75, 1].map((part) => (
        <g key={part}>
          <line x1={LEFT} x2={width} y1={floor - part * (floor - 16)} y2={floor - part * (floor - 16)} stroke="#333" />
          <text x={LEFT - 6} y={floor - part * (floor - 16) + 4} fontSize="11" textAnchor="end" fill="#ccccdc">{text(bars[0], part * most)}</text>
        </g>
      ))}
      {names.values.map((level, n) => (
        <g key={n}>
          <text x={LEFT + (n + 0.5) * group} y={floor + 15} fontSize="12" textAnchor="middle" fill="#ccccdc">{level}</text>
          {bars.map((field, b) => {
            const value = field.values[n];
            if (value === null || value === undefined || !Number.isFinite(value)) return null;
            const tall = (value / most) * (floor - 16);
            const x = LEFT + n * group + group * 0.125 + b * bar;
            return (
              <g key={b}>
                <rect x={x} y={floor - tall} width={bar * 0.95} height={tall} fill={TONES[b % TONES.length]} opacity={0.85} />
                {bar > 40 ? <text x={x + bar / 2} y={floor - tall - 3} fontSize="11" textAnchor="middle" fill="#ccccdc">{text(field, value).replace(/ tok.s/, '')}</text> : null}
              </g>
            );
          })}
        </g>
      ))}
      {bars.map((field, b) => (
        <g key={b} transform={`translate(${LEFT + b * 190} ${height - 8})`}>
          <rect width="14" height="4" y="-5" fill={TONES[b % TONES.length]} />
          <text x="20" fontSize="12" fill="#ccccdc">{field.state.displayName}</text>
        </g>
      ))}
    </svg>
  );
}
