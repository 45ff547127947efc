// One board, from its committed JSON and a real Prometheus, drawn with Grafana's own panel components.
//
//   /?board=stopline-lines&prometheus=http://127.0.0.1:9090&from=UNIX&to=UNIX&var-pod=hy3-0
import React from 'react';
import { createRoot } from 'react-dom/client';
import { createTheme, ThemeContext } from '@grafana/data';
import { GlobalStyles } from '@grafana/ui';
import { Board } from './board.jsx';
import { load } from './data.js';

const theme = createTheme({ colors: { mode: 'dark' } });
const asked = Object.fromEntries(new URLSearchParams(window.location.search));
const root = createRoot(document.getElementById('root'));

load(asked).then(
  (board) => {
    root.render(
      <ThemeContext.Provider value={theme}>
        <GlobalStyles isExtensionSidebarOpen={false} />
        <Board {...board} theme={theme} />
      </ThemeContext.Provider>
    );
    setTimeout(() => (document.title = 'ready'), 500);
  },
  (problem) => {
    document.body.style.color = 'red';
    document.body.textContent = `${problem.stack}`;
  }
);
