// One script of everything. Grafana's packages are .mjs files that were written for bundlers: they expect the default
// export of a CommonJS module to be what that module calls default, where Node, and esbuild for .mjs, gives the whole.
import { readFile } from 'node:fs/promises';
import { dirname } from 'node:path';
import { build } from 'esbuild';

const forBundlers = {
  name: 'for-bundlers',
  setup(make) {
    make.onResolve({ filter: /./ }, async (asked) => {
      if (asked.pluginData === 'resolving') return undefined;
      const { path, importer, resolveDir, kind } = asked;
      const found = await make.resolve(path, { importer, resolveDir, kind, pluginData: 'resolving' });
      if (!/node_modules\/@grafana\/.*\.mjs$/.test(found.path)) return found;
      return { path: found.path.replace(/\.mjs$/, '.js'), namespace: 'grafana', sideEffects: found.sideEffects };
    });
    make.onLoad({ filter: /./, namespace: 'grafana' }, async ({ path }) => ({
      contents: await readFile(path.replace(/\.js$/, '.mjs'), 'utf8'),
      resolveDir: dirname(path),
      loader: 'js',
    }));
  },
};

await build({
  entryPoints: ['src/main.jsx'],
  outfile: '.build/main.js',
  bundle: true,
  minify: true,
  format: 'esm',
  jsx: 'automatic',
  define: { global: 'window' },
  loader: { '.svg': 'dataurl', '.ttf': 'empty', '.woff2': 'empty' },
  logLevel: 'error',
  plugins: [forBundlers],
});
